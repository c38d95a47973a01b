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
# # Scan a pretrained model
#
# Which heads of a real model are positional, with which offset, how exactly? SmolLM2-135M has 270
# heads (30 layers of 9). `lenprobe fetch smollm2` puts its weights where this notebook finds them.
# Runs in about two minutes on two CPU cores.

# %%
from lenprobe import ablated, scan
from lenprobe.hosts import host_of
from lenprobe.pretrained import smollm2

model = smollm2()
found = scan(model, length=128, progress=False)
print(found)

# %% [markdown]
# Two kinds of tokens answer two questions: uniform random ones say what positions do by themselves,
# natural text what a head does at work.

# %%
found.most_positional(8, tokens="text")[
    ["layer", "head", "near", "near_weight", "near_uniform", "positional", "alignment", "horizon"]
].round(3)

# %% [markdown]
# ## The whole model
#
# Attention at the best near offset, by layer and head, on natural text.

# %%
from lenprobe.plots import plot_heatmap

plot_heatmap(
    found.grid("near_weight", tokens="text"),
    row_label="layer",
    column_label="head",
    value_label="attention at the best offset of 1 to 8",
);

# %% [markdown]
# ## One head, looked at
#
# The strongest one. Its carrier says how the rule is made; `rule_of` puts it in a sentence.

# %%
from lenprobe import carrier_of, rule_of
from lenprobe.scan_tokens import contents_for, passage

text = contents_for(host_of(model), None, passage(), length=128, batch=4, seed=0)["text"]
best = found.most_positional(1, tokens="text").iloc[0]
layer, head = int(best["layer"]), int(best["head"])
print(f"L{layer}H{head}:", rule_of(model, layer, head, text).sentence)
carrier_of(model, layer, head, text, target=int(best["near"])).plot();

# %% [markdown]
# A previous-token detector would have found that one. It has no name for these: heads whose best
# near offset is two or more.

# %%
frame = found.to_frame()
beyond = frame[(frame["tokens"] == "text") & (frame["near"] > 1)]
beyond.sort_values("near_weight", ascending=False)[
    ["layer", "head", "near", "near_weight", "near_uniform"]
].head(5).round(3)

# %% [markdown]
# ## Which rotary pairs do it
#
# The share of each rotary pair in the sum of amplitudes, for the strongest head: the fast pairs tell
# neighbours apart, the slow ones are all but constant over 128 tokens.

# %%
row = best.name
for wavelength, share in zip(found.wavelengths[row][:8], found.usage[row][:8], strict=True):
    print(f"wavelength {wavelength:7.1f} tokens: {share:.3f}")

# %% [markdown]
# ## Do these heads matter
#
# Silence the ten heads with the most attention at a near offset, and ten random heads of the same
# layers, and look at the loss on natural text.

# %%
import numpy as np
import torch


def loss():
    with torch.no_grad():
        logits = model(text)
    return float(
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    )


chosen = [
    (int(r.layer), int(r.head)) for r in found.most_positional(10, tokens="text").itertuples()
]
draw = np.random.default_rng(0)
others = [(layer, int(draw.choice(9))) for layer, _ in chosen]
print(f"as it is: {loss():.2f} nats a token")
for name, heads in (("most positional", chosen), ("random, same layers", others)):
    with ablated(model, heads):
        print(f"without ten heads, {name}: {loss():.2f} nats a token")
