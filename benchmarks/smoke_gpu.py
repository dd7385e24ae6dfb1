import os, sys, time, statistics, traceback
import torch, pygraph
from pygraph.runtime.devices import driver_for
dev=torch.device('cuda',0)
def T(name, f):
    t=time.time()
    try: print("OK  ", name, f(), f"{time.time()-t:.2f}s", flush=True)
    except Exception as e:
        print("FAIL", name, type(e).__name__, str(e)[:600]); traceback.print_exc(limit=-6); sys.stdout.flush()
@pygraph.jit
def f(x,k): return torch.relu(x@x.t())*k + 1
def basic():
    x=torch.randn(64,64,device=dev)
    for k in (2.,3.5,-1.):
        a=f(x,k); assert torch.equal(a,f.fn(x,k)), (a-f.fn(x,k)).abs().max()
    y=torch.randn(64,64,device=dev); assert torch.equal(f(y,.5),f.fn(y,.5)); z=f(f(y,.1),.2); assert torch.equal(z,f.fn(f.fn(y,.1),.2))
    return f.cache_info(), f.explain()
T("basic",basic)
def nodes():
    e=list(f._entries.values())[0].executable
    for n in e.graphs[0].graph.nodes: print("   ",n.kind,n.name[:90],n.op,len(n.params))
    print(e.graphs[0]._words, e.graphs[0]._values)
T("nodes",nodes)
def item():
    @pygraph.jit
    def g(x): return x*x.sum().item()+x[x>0].sum()
    x=torch.randn(64,device=dev); torch.testing.assert_close(g(x),g.fn(x)); return g.explain()
T("item",item)
def rnd():
    @pygraph.jit
    def g(x): return torch.nn.functional.dropout(x,.5)+torch.rand(4,device=x.device)
    x=torch.ones(100,4,device=dev)
    torch.manual_seed(0); a=[g(x).clone() for _ in range(4)]; torch.manual_seed(0); b=[g.fn(x) for _ in range(4)]
    for u,v in zip(a,b): assert torch.equal(u,v)
    return g.cache_info()
T("random",rnd)
def mut():
    bn=torch.nn.BatchNorm1d(8).to(dev)
    @pygraph.jit
    def g(x,y): y.add_(1); x[0].mul_(2); return bn(x), x.t()
    import copy
    bn2=copy.deepcopy(bn); x=torch.randn(4,8,device=dev); y=torch.zeros(3,device=dev); x2,y2=x.clone(),y.clone()
    with torch.no_grad():
        for _ in range(3):
            a,at=g(x,y); y2.add_(1); x2[0].mul_(2); b=bn2(x2); torch.testing.assert_close(a,b); assert at.data_ptr()==x.data_ptr(); torch.testing.assert_close(x,x2); assert torch.equal(y,y2)
    torch.testing.assert_close(bn.running_mean,bn2.running_mean); assert bn.num_batches_tracked==3
    return g.explain()
T("mutate",mut)
def refused():
    # an operation that the driver refuses to record
    lib=torch.library.Library("smoke","FRAGMENT"); lib.define("sync(Tensor x) -> Tensor")
    def impl(x): torch.cuda.synchronize(); return x*x.sum().cpu().item()
    lib.impl("sync",impl,"CUDA"); lib.impl("sync",lambda x: torch.empty_like(x),"Meta")
    @pygraph.jit
    def g(x): return torch.ops.smoke.sync(torch.sin(x)).cos().exp()
    x=torch.randn(8,device=dev); torch.testing.assert_close(g(x),g.fn(x)); torch.rand(3,device=dev); y=torch.randn(1000,device=dev); del y
    s=str(g.explain()); lib._destroy(); return s
T("refused",refused)
def bert():
    import transformers
    cfg=transformers.BertConfig(); m=transformers.BertModel(cfg).to(dev).to(torch.bfloat16).eval()
    ids=torch.randint(0,30000,(1,128),device=dev); mask=torch.ones(1,128,dtype=torch.long,device=dev)
    fm=pygraph.jit(m)
    with torch.no_grad():
        t=time.time(); out=fm(ids,attention_mask=mask); print("compile s",time.time()-t)
        ref=m(ids,attention_mask=mask)
        ids2=torch.randint(0,30000,(1,128),device=dev); out2=fm(ids2,attention_mask=mask); ref2=m(ids2,attention_mask=mask)
        print("diff",(out[0]-ref[0]).abs().max().item(),(out2[0]-ref2[0]).abs().max().item())
        print(fm.explain())
        g=torch.cuda.CUDAGraph()
        s=torch.cuda.Stream()
        with torch.cuda.stream(s):
            for _ in range(3): m(ids,attention_mask=mask)
        torch.cuda.synchronize()
        with torch.cuda.graph(g): m(ids,attention_mask=mask)
        def bench(fn,n=50):
            for _ in range(5): fn()
            torch.cuda.synchronize(); r=[];c=[]
            for _ in range(7):
                t=time.perf_counter()
                for _ in range(n): fn()
                c.append((time.perf_counter()-t)/n*1e6)
                torch.cuda.synchronize(); r.append((time.perf_counter()-t)/n*1e6)
            return f"{statistics.median(r):.1f} us (cpu {statistics.median(c):.1f})"
        print("eager",bench(lambda:m(ids,attention_mask=mask)),"raw",bench(g.replay),"jit",bench(lambda:fm(ids,attention_mask=mask)),"raw",bench(g.replay))
        e=list(fm._pygraph_transformed._entries.values())[-1].executable
        leaves=[l for l in torch.utils._pytree.tree_leaves(((ids,),{'attention_mask':mask}))]
        print("executable only",bench(lambda:e(leaves)), "replay only", bench(e.graphs[0].graph.replay))
T("bert",bert)
