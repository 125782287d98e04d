"""The HSTU ranking model in torch, after config.json: what sdk/docs/model-folder.md computes, with NVIDIA's blocks.

A history is a row for each event, movie and rating added up, that sees itself and the rows before it. A candidate is a
row of its movie alone, that sees itself and as many rows of the history as were known at its moment; any number of
candidates, each of a moment of its own, go through in one pass with the history they share.
"""

import math

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, block = config["embedding_size"], config["block"]
        self.heads, self.head_size, self.scale = block["heads"], block["head_size"], block["scaling_seqlen"]
        width = self.heads * self.head_size
        self.input_norm = nn.LayerNorm(size, eps=1e-5)
        self.uvqk = nn.Linear(size, 4 * width)
        self.output_norm = nn.LayerNorm(width, eps=1e-5)
        self.output = nn.Linear(width, size, bias=False)

    def forward(self, history, candidates, seen, dropout):
        """Rows of the history [B, N, E] and candidates [B, C, E], of which each sees `seen` [B, C] of the history."""
        u, v, q, k = self.parts(history)
        new_u, new_v, new_q, new_k = self.parts(candidates)
        steps = torch.arange(history.shape[1])
        past = self.weights(q, k) * (steps[None, :] <= steps[:, None])
        known = self.weights(new_q, k) * (steps < seen[:, None, :, None])
        # A candidate sees itself, and no other candidate.
        own = functional.silu((new_q * new_k).sum(-1, keepdim=True) / math.sqrt(self.head_size)) / self.scale
        history = history + self.gated(u, past @ v, dropout)
        candidates = candidates + self.gated(new_u, known @ v + own * new_v, dropout)
        return history, candidates

    def parts(self, x):
        """u unchanged, and v, q and k by head: [B, H, rows, D]."""
        u, *rest = functional.silu(self.uvqk(self.input_norm(x))).chunk(4, dim=-1)
        return u, *(part.unflatten(-1, (self.heads, self.head_size)).transpose(1, 2) for part in rest)

    def weights(self, q, k):
        return functional.silu(q @ k.transpose(-1, -2) / math.sqrt(self.head_size)) / self.scale

    def gated(self, u, attended, dropout):
        gated = u * self.output_norm(attended.transpose(1, 2).flatten(2))
        return self.output(functional.dropout(gated, dropout, self.training))


class Ranker(nn.Module):
    """`content` [movies, C] has the features of each movie; they are merged into the table, so serving does not need them."""

    def __init__(self, config, content, dropout):
        super().__init__()
        size, tables = config["embedding_size"], config["tables"]
        self.dropout, self.scale = dropout, math.sqrt(size)
        self.register_buffer("content", content, persistent=False)
        self.movies = nn.Embedding(tables["movies"]["rows"], size)
        self.of_content = nn.Parameter(torch.randn(content.shape[1], size) * 0.5 / self.scale)
        self.ratings = nn.Embedding(tables["ratings"]["rows"], size)
        self.positions = nn.Embedding(config["positions"]["buckets"], size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config["block"]["layers"]))
        self.final_norm = nn.LayerNorm(size, eps=1e-5)
        self.head = nn.Sequential(nn.Linear(size, 64), nn.SiLU(), nn.Linear(64, 2))
        with torch.no_grad():
            nn.init.normal_(self.movies.weight, std=0.3 / self.scale)
            nn.init.normal_(self.ratings.weight, std=0.5 / self.scale)
            self.positions.weight.copy_(0.3 * waves(*self.positions.weight.shape))

    def forward(self, movies, ratings, candidates, seen):
        """Logits [B, C, tasks]. Histories are padded at their end, where no candidate looks."""
        table = self.table()
        history = (table[movies] + self.ratings(ratings)) * self.scale + self.placed(torch.arange(movies.shape[1]))
        rows = table[candidates] * self.scale + self.placed(seen)
        history, rows = (functional.dropout(x, self.dropout, self.training) for x in (history, rows))
        for layer in self.layers:
            history, rows = layer(history, rows, seen, self.dropout)
        return self.head(self.final_norm(rows))

    def placed(self, positions):
        return self.positions(positions.clamp(max=self.positions.num_embeddings - 1))

    def table(self):
        return self.movies.weight + self.content @ self.of_content

    def state(self):
        """The weights under the names that the exporter reads."""
        named = {
            name: value for name, value in self.state_dict().items() if name not in ("movies.weight", "of_content")
        }
        named = {name: value for name, value in named.items() if name != "ratings.weight"}
        return named | {
            "tables.movies.rows": self.table().detach(),
            "tables.ratings.rows": self.ratings.weight.detach(),
        }


def waves(count, size):
    """Sines and cosines of many lengths: near positions start with similar vectors, which makes recency easy to learn."""
    lengths = torch.exp(torch.linspace(math.log(4), math.log(4 * count), size // 2))
    angles = 2 * math.pi * torch.arange(count)[:, None] / lengths
    return torch.cat([angles.sin(), angles.cos()], dim=1)
