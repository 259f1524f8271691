"""From what the optimizer did at every step to what every training pattern wrote.

`sgd.py` is the rule with scalars only, whose coefficients one short recursion gives; `adaptive.py`
says what Adam and its relatives have in common, the files beside it what each of them does;
`known.py` knows which optimizer follows which rule, and why some are refused.
"""

from dualform.learning_rules.adaptive import AdaptiveLog as AdaptiveLog
from dualform.learning_rules.adaptive import AdaptiveRule as AdaptiveRule
from dualform.learning_rules.adaptive import Elementwise as Elementwise
from dualform.learning_rules.adaptive import Settings as Settings
from dualform.learning_rules.adaptive import State as State
from dualform.learning_rules.adaptive import coupled_decay as coupled_decay
from dualform.learning_rules.adaptive import loss_gradient as loss_gradient
from dualform.learning_rules.known import ADAPTIVE as ADAPTIVE
from dualform.learning_rules.known import SGD as SGD
from dualform.learning_rules.known import adaptive_rule_of as adaptive_rule_of
from dualform.learning_rules.known import momentum_buffer as momentum_buffer
from dualform.learning_rules.known import names_of_settings as names_of_settings
from dualform.learning_rules.known import rule_of as rule_of
from dualform.learning_rules.known import settings_of as settings_of
from dualform.learning_rules.known import unknown_rule as unknown_rule
from dualform.learning_rules.sgd import HYPERPARAMETERS as HYPERPARAMETERS
from dualform.learning_rules.sgd import Coefficients as Coefficients
from dualform.learning_rules.sgd import ParameterLog as ParameterLog
from dualform.learning_rules.sgd import coefficients as coefficients
from dualform.learning_rules.sgd import hyperparameters as hyperparameters
from dualform.learning_rules.sgd import transitions as transitions
