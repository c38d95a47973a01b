# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Attention views
#
# [circuitsvis](https://github.com/TransformerLensOrg/CircuitsVis) views of a trained head, of heads
# set by hand and of a pretrained one, here and as one file that needs no network.

# %%
import torch

from lenprobe import FixedOffset, attention_view, build, fit, planted
from lenprobe.reading import read

task = FixedOffset(3)
model = build("rope", seed=0)
fit(model, task, lengths=[16], progress=False)
tokens = task.sample(1, 24, generator=torch.Generator().manual_seed(1))
trained = attention_view(read(model, tokens, layer=0).pattern[0], tokens[0].tolist())
trained

# %% [markdown]
# ## Heads set by hand
#
# A carrier at offset 3, a pin to slot 2, and a head that looks for what followed the last occurrence
# of its own token. Their truth is known, so they show what each kind looks like.

# %%
heads = {
    "carrier at offset 3": planted.carrier(3),
    "pinned to slot 2": planted.pin(2),
    "induction": planted.induction(),
}
views = {}
for name, head in heads.items():
    own = head.model
    sequence = torch.randint(
        own.cfg.d_vocab, (1, 16), generator=torch.Generator().manual_seed(0)
    )
    pattern = read(own, sequence, head.layer, [head.head]).pattern[0]
    views[name] = attention_view(pattern, sequence[0].tolist())
views["carrier at offset 3"]

# %%
views["pinned to slot 2"]

# %%
views["induction"]

# %% [markdown]
# ## A pretrained head
#
# The strongest previous-token head of SmolLM2, on a line of text.

# %%
from lenprobe import scan
from lenprobe.pretrained import smollm2

real = smollm2()
text = "The hands on the four white faces moved together by the width of a finger."
ids = torch.tensor([real.tokenizer(text)["input_ids"]])
best = scan(real, length=64, progress=False).most_positional(1, tokens="text").iloc[0]
pattern = read(real, ids, int(best["layer"]), [int(best["head"])]).pattern[0]
words = [real.tokenizer.decode([token]) for token in ids[0]]
views["SmolLM2"] = attention_view(pattern, words)
views["SmolLM2"]

# %% [markdown]
# ## As a file

# %%
import tempfile
from pathlib import Path

from lenprobe.views import page_of

page = page_of({"trained": trained, **views}, title="Trained, planted and pretrained heads")
path = Path(tempfile.mkdtemp()) / "attention.html"
path.write_text(page, encoding="utf-8")
print(f"{path.name}: {len(page) / 1e6:.1f} MB, opens with no network")
