from torch.nn.functional import mse_loss


def train_batch(net, x):
    error = mse_loss(net(x), x.sum(1, keepdim=True))
    error.backward()  # finds G01


def step_done(optimizer):
    optimizer.step()
    optimizer.zero_grad()
