import torch, pytest
from importlib.util import spec_from_file_location, module_from_spec
sp=spec_from_file_location("tv","/work/main/tests/attention/test_verification.py"); tv=module_from_spec(sp); sp.loader.exec_module(tv)
@pytest.mark.parametrize("r",tv.RULES)
def test_x(train,r):
    for S,dt in ((3000,torch.float32),(200,torch.float64),(200,torch.float32)):
        run=train(steps=S,dtype=dt,**tv.RULES[r]); w={}
        for c in run.dual.verify(run.inputs[:4]).checks: w[c.kind]=max(w.get(c.kind,0),c.residual/c.bound if c.residual else 0)
        print(f"{r:25} {S} {str(dt)[6:]}"," ".join(f"{k}={x:.3f}" for k,x in w.items()))
