# SPDX-License-Identifier: Apache-2.0
"""Tests that a downstream project runs over its own architecture or head, under pytest.

    from headswap.convert.testing import AdapterConformance

    class TestMine(AdapterConformance):
        def source(self):
            return MyForCausalLM(MyConfig(vocab_size=99, hidden_size=32)).eval()

Every `test_*` method of the subclass is then collected. What differs from a causal model under a
score head is said by overriding an attribute or `reference`.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from headswap.convert.api import as_seq_cls_model, load
from headswap.registry.errors import ConversionError


class AdapterConformance:
    """What holds for every architecture and head that headswap serves.

    `head` is the head family (None for the architecture's own), `pad_rows` says whether rows of
    several lengths may be mixed (a backbone that takes no attention mask can't).
    """

    head: ClassVar[str | None] = None
    num_labels: ClassVar[int] = 3
    tolerance: ClassVar[float] = 1e-5
    pad_rows: ClassVar[bool] = True

    def source(self) -> Any:
        """A small random model in eval mode, the same at each call; its class is registered."""
        raise ConversionError(
            f"{type(self).__name__} has no source(); return the model that is to be converted."
        )

    def reference(self, model: Any, ids: Tensor) -> Tensor:
        """The logits `[1, num_labels]` that `model` ought to give for `ids` `[1, length]`.

        Unless you override this: score times the state that the source feeds its output embedding.
        """
        source, fed = self.source(), list[Tensor]()
        output = source.get_output_embeddings()
        hook = output.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0]))
        source(input_ids=ids)
        hook.remove()
        linear = model.get_submodule(model.head_spec.output.path)
        return F.linear(fed[-1][:, -1].float(), linear.weight.float(), linear.bias)

    def rows(self) -> list[list[int]]:
        """Token ids of a few rows of different lengths."""
        return [[5, 6, 7, 8, 9], [11, 12, 13], [21, 22, 23, 24, 25, 26, 27, 28], [31]]

    # -- the tests --------------------------------------------------------------------------------

    @torch.no_grad()
    def test_logits_are_the_reference_s(self) -> None:
        """Each row on its own."""
        model = self._converted()
        for row in self.rows():
            self._close(self._alone(model, row), self.reference(model, torch.tensor([row])))

    @torch.no_grad()
    def test_neither_padding_nor_neighbours_change_a_row(self) -> None:
        """Pads on the right, on the left, and on both sides."""
        if not self.pad_rows:
            return
        model, rows = self._converted(), self.rows()
        wanted = torch.cat([self._alone(model, row) for row in rows])
        for left in ([0] * len(rows), [9] * len(rows), [i % 5 for i in range(len(rows))]):
            self._close(model(**_padded(rows, left)).logits, wanted)

    @torch.no_grad()
    def test_a_saved_model_is_the_same_when_it_is_loaded(self) -> None:
        """`save_pretrained`, then `headswap.load` by the folder alone."""
        model, row = self._converted(), self.rows()[0]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = load(folder)
        if type(again).__name__ != type(model).__name__:
            raise AssertionError(f"saved {type(model).__name__}, loaded {type(again).__name__}")
        self._close(self._alone(again, row), self._alone(model, row))

    @torch.no_grad()
    def test_the_source_stays_as_it_was_and_shares_its_tensors(self) -> None:
        """Config and outputs of the source are the same after a conversion; no second copy."""
        source, ids = self.source(), torch.tensor([self.rows()[0]])
        config, before = copy.deepcopy(source.config.to_dict()), source(input_ids=ids)[0]
        model = self._converted(source)
        if source.config.to_dict() != config:
            raise AssertionError("the conversion changed the source's config")
        self._close(source(input_ids=ids)[0], before)
        own = {tensor.data_ptr() for tensor in source.parameters()}
        copied = [n for n, p in model.backbone.named_parameters() if p.data_ptr() not in own]
        head = set(model.head_spec.tensors())
        if {f"{model.backbone_name}.{name}" for name in copied} - head:
            raise AssertionError(f"these tensors are copies: {copied[:4]}")

    def test_the_class_is_one_object_and_pickles(self) -> None:
        """Two requests give one class, and pickle gives it back."""
        made = type(self._converted())
        if made is not type(self._converted()) or pickle.loads(pickle.dumps(made)) is not made:
            raise AssertionError(f"{made.__name__} is made anew at each request")

    # -- how they are run -------------------------------------------------------------------------

    def _converted(self, source: Any = None) -> Any:
        torch.manual_seed(0)  # for the new head
        source = self.source() if source is None else source
        return as_seq_cls_model(source, num_labels=self.num_labels, head=self.head).eval()

    def _alone(self, model: Any, row: list[int]) -> Tensor:
        found: Tensor = model(input_ids=torch.tensor([row])).logits
        return found

    def _close(self, found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found, wanted, atol=self.tolerance, rtol=0)


def _padded(rows: list[list[int]], left: list[int]) -> dict[str, Tensor]:
    width = max(n + len(row) for n, row in zip(left, rows, strict=True))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for i, (start, row) in enumerate(zip(left, rows, strict=True)):
        ids[i, start : start + len(row)] = torch.tensor(row)
        mask[i, start : start + len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}
