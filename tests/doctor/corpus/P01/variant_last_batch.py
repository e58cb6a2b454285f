# ways: script, ranks
import torch
import torch.distributed as td
from torch import nn
from torch.distributed import pipelining as pp
from torch.utils.data import DataLoader, TensorDataset


class Half(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.layer(x))


class PipelineTrainer:
    def __init__(self, chunks):
        self.place, self.places = td.get_rank(), td.get_world_size()
        self.part = Half(4)
        stage = pp.PipelineStage(self.part, self.place, self.places, torch.device("cpu"))
        self.schedule = pp.Schedule1F1B(stage, n_microbatches=chunks, loss_fn=nn.functional.mse_loss)
        self.opt = torch.optim.SGD(self.part.parameters(), lr=0.1)

    def train(self, batches):
        for x, y in batches:
            self.opt.zero_grad()
            if self.place == 0:
                self.schedule.step(x)  # finds P01
            elif self.place == self.places - 1:
                self.schedule.step(target=y)
            else:
                self.schedule.step()
            self.opt.step()


def make_batches():
    g = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(42, 4, generator=g), torch.randn(42, 4, generator=g))
    return DataLoader(data, batch_size=16)


if __name__ == "__main__":
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    PipelineTrainer(4).train(make_batches())
    td.destroy_process_group()
