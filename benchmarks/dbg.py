import torch, traceback
g=torch.cuda.default_generators[0]
x=torch.randn(8,device='cuda'); torch.rand(2,device='cuda')
h=torch.cuda.graph_pool_handle(); s=torch.cuda.Stream()
def fail(sync, h):
    G=torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(s):
        G.capture_begin(pool=h, capture_error_mode="thread_local")
        try:
            y=x*2
            if sync=='sync': torch.cuda.synchronize()
            if sync=='item': y.sum().item()
            if sync=='py': raise ValueError
            if sync=='h2d': y.copy_(torch.ones(8))
        except Exception as e: print(" body",type(e).__mro__[:3],str(e)[:100])
        try: G.capture_end()
        except Exception as e:
            print(" end",type(e),str(e)[:200])
            for fn in ("_cuda_endAllocateToPool",):
                try: print("  ",fn,getattr(torch._C,fn)(0,h))
                except Exception as e: print("  ",fn,type(e),str(e)[:200])
    try: G.reset()
    except Exception as e: print(" reset",type(e),str(e)[:200])
    for n,f in (("sync",torch.cuda.synchronize),("rand",lambda:torch.rand(2,device='cuda')),("alloc",lambda:torch.empty(1<<20,device='cuda'))):
        try: f(); print("  ",n,"ok")
        except Exception as e: print("  ",n,type(e),str(e)[:200])
def dummy():
    G=torch.cuda.CUDAGraph()
    with torch.cuda.stream(s):
        G.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1,device='cuda')
        G.capture_end()
    G.reset()
for k in ('py','item','sync','h2d'):
    print(k); fail(k,h)
    try: dummy(); print("  dummy ok")
    except Exception as e: print("  dummy",type(e),str(e)[:200])
    try: print("  rand",torch.rand(2,device='cuda'))
    except Exception as e: print("  rand",type(e),str(e)[:200])
    G=torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(s):
            G.capture_begin(pool=h, capture_error_mode="thread_local"); z=x+1; r=torch.rand(3,device='cuda'); G.capture_end()
        G.replay(); torch.cuda.synchronize(); print("  recapture same pool ok")
    except Exception as e: print("  recapture",type(e),str(e)[:200])
