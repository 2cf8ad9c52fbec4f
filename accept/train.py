# Trains for argv[1] steps, or with 0 until a line of input, and prints their number and the
# digest of the weights. The same number of steps has the same digest.
import hashlib, os, sys, threading
import torch

if not torch.cuda.is_available():
    sys.exit("torch has no GPU")
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))
data = torch.randn(64, 256, 1024)
model, data = model.cuda(), data.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
limit, step = int(sys.argv[1]), 0
while limit and step < limit or not limit and not stop.is_set():
    batch = data[step % len(data)]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(batch), batch).backward()
    optimizer.step()
    step += 1
    if step == 1:
        torch.cuda.synchronize()
        print("ready", os.getpid(), flush=True)
torch.cuda.synchronize()
digest = hashlib.sha256()
for p in model.parameters():
    digest.update(p.detach().cpu().numpy().tobytes())
print(step, digest.hexdigest(), flush=True)
