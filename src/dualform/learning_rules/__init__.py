"""From what the optimizer did at every step to what every training pattern wrote.

`settings.py` reads what a step depends on; `replaying.py` lets torch's own optimizer take it again,
to the bit; a file per rule says what it does to W and m, given what torch remembers; `known.py`
lists them; `coefficients.py` is the recursion for SGD.
"""

from dualform.learning_rules.coefficients import Coefficients as Coefficients
from dualform.learning_rules.coefficients import coefficients as coefficients
from dualform.learning_rules.coefficients import linear_steps as linear_steps
from dualform.learning_rules.factors import Factors as Factors
from dualform.learning_rules.known import RULES as RULES
from dualform.learning_rules.known import Rule as Rule
from dualform.learning_rules.known import rule_of as rule_of
from dualform.learning_rules.replaying import Classes as Classes
from dualform.learning_rules.replaying import OneParameter as OneParameter
from dualform.learning_rules.replaying import State as State
from dualform.learning_rules.replaying import class_of as class_of
from dualform.learning_rules.replaying import classes as classes
from dualform.learning_rules.replaying import converted as converted
from dualform.learning_rules.replaying import optimizer_of_one as optimizer_of_one
from dualform.learning_rules.settings import SeenSettings as SeenSettings
from dualform.learning_rules.settings import Setting as Setting
from dualform.learning_rules.settings import class_path as class_path
from dualform.learning_rules.settings import read_setting as read_setting
from dualform.learning_rules.sgd import linear_factors as linear_factors
