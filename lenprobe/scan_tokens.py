"""What a scan reads: random tokens, natural text, or what the user gives; and whether it fits."""

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lenprobe.hosts import Host
from lenprobe.reading import check_tokens

_LENGTH = 512
_COPIES = 5  # of one layer's logits: scores, pattern, what is read, and two for the arithmetic


def passage() -> str:
    """The natural text that scans read by default, written for lenprobe.

    >>> passage().split()[:3]
    ['The', 'ferry', 'to']
    """
    return resources.files("lenprobe").joinpath("data", "passage.txt").read_text(encoding="utf-8")


def read_text(path: Path) -> str:
    """A file of natural text.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"text={str(path)!r}: there is no such file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"text={str(path)!r} is no UTF-8 text: {error}") from error


def read_tokens(path: Path) -> Int[Tensor, "batch pos"]:
    """A file of token ids, one sequence a line, apart by spaces or commas, all as long.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a line holds something else, or lines differ in length.
    """
    if not path.is_file():
        raise FileNotFoundError(f"tokens={str(path)!r}: there is no such file")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.replace(",", " ").split()
        if words:
            wrong = [word for word in words if not word.isdecimal()]
            if wrong:
                raise ValueError(
                    f"tokens={str(path)!r} line {number} holds {wrong[0]!r}; write token ids, "
                    "whole numbers from 0 on"
                )
            rows.append([int(word) for word in words])
    if not rows or len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"tokens={str(path)!r} holds {len(rows)} sequences of lengths "
            f"{sorted({len(row) for row in rows})}; write 2 or more, all of one length"
        )
    return torch.tensor(rows)


def contents_for(
    host: Host,
    tokens: Int[Tensor, "batch pos"] | None,
    text: str | None,
    *,
    length: int | None,
    batch: int,
    seed: int,
) -> dict[str, Int[Tensor, "batch pos"]]:
    """Token sequences by kind: ``given``, or ``text``, or ``random`` and ``text``."""
    if batch < 2:
        raise ValueError(f"batch={batch}: 2 or more, since contents are compared with each other")
    if tokens is not None:
        if text is not None or length is not None:
            raise ValueError("tokens are given: leave text and length out, or pass no tokens")
        tokens = check_tokens(host, tokens)
        if tokens.shape[0] < 2:
            raise ValueError(
                f"tokens has shape {list(tokens.shape)}; 2 sequences or more are needed, since "
                "contents are compared with each other"
            )
        return {"given": tokens}
    n = min(_LENGTH, host.n_ctx) if length is None else length
    if not 8 <= n <= host.n_ctx:
        raise ValueError(
            f"length={n}: 8 to n_ctx={host.n_ctx} tokens, the longest that {host.description} takes"
        )
    tokenizer = getattr(host.model, "tokenizer", None)
    if text is not None:
        if tokenizer is None:
            raise ValueError(
                "text needs a tokenizer, which this model has not; pass tokens [batch, pos]"
            )
        return {"text": _rows(host, tokenizer, text, n, batch)}
    found = {"random": _random(host, tokenizer, n, batch, seed)}
    if tokenizer is not None:
        shorter = len(_ids(tokenizer, passage())) < 2 * n  # the passage is short for long scans
        if not shorter:
            found["text"] = _rows(host, tokenizer, passage(), n, batch)
    return found


def check_room(host: Host, length: int, batch: int) -> None:
    """Raises where one layer's logits, and the copies made of them, do not fit in memory."""
    room = _free(host.device)
    itemsize = 4
    need = _COPIES * batch * host.n_heads * length**2 * itemsize
    if room is None or need <= room:
        return
    fits = int((room / (_COPIES * batch * host.n_heads * itemsize)) ** 0.5)
    raise ValueError(
        f"length={length} with batch={batch} needs about {need / 1e9:.1f} GB for one layer's "
        f"logits ({host.n_heads} heads, {_COPIES} copies), and {room / 1e9:.1f} GB are free; take "
        f"length={max(8, fits // 8 * 8)} or less (--length), or a smaller batch (--batch)"
    )


def _free(device: torch.device) -> float | None:
    """Bytes free on the device; None where nobody says."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _random(
    host: Host, tokenizer: Any, length: int, batch: int, seed: int
) -> Int[Tensor, "batch pos"]:
    """Uniform over the vocabulary without special tokens."""
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    size = host.d_vocab if tokenizer is None else min(host.d_vocab, len(tokenizer))
    allowed = torch.tensor([token for token in range(size) if token not in special])
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(allowed), (batch, length), generator=generator)
    return allowed[drawn].to(host.device)


def _rows(
    host: Host, tokenizer: Any, text: str, length: int, batch: int
) -> Int[Tensor, "batch pos"]:
    ids = _ids(tokenizer, text)
    rows = min(batch, len(ids) // length)
    if rows < 2:
        raise ValueError(
            f"text has {len(ids)} tokens, too few for 2 sequences of length={length}; give a "
            f"longer text, or take length={max(8, len(ids) // 2)} or less (--length)"
        )
    return check_tokens(host, torch.tensor(ids[: rows * length]).view(rows, length))


def _ids(tokenizer: Any, text: str) -> Sequence[int]:
    found: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found
