"""Hugging Face: `Trainer`, accelerate's loop, peft's adapters. Models are made from configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs.proving import (
    alone,
    certified,
    draws,
    ends_before_other_weights,
    recorded,
    started,
    the_same_weights,
)
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

import dualform
from dualform.certificate.report import BITS

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")  # which Trainer needs, too

WORDS, LENGTH = 40, 6


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens, labelled by the first of them; held out, the other way round: there the
    first epoch is the best."""

    def __init__(self, size: int, *, held_out: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(2, WORDS, (size, LENGTH), generator=generator)
        self.labels = ((self.tokens[:, 0] > WORDS // 2) != held_out).long()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens[number],
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": self.labels[number],
        }


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)


class HuggingFace:
    """`Trainer`, which makes its optimizer inside `train()` and puts the best weights back."""

    def __init__(self, place: Path, **settings: Any) -> None:
        self.model, self.place, self.settings = bert(), place, settings
        self.texts = Texts(24)

    def train(self, *callbacks: Any, checkpoint: str | None = None) -> None:
        arguments = transformers.TrainingArguments(
            output_dir=str(self.place),
            num_train_epochs=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            warmup_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            seed=0,
            **({"save_strategy": "no", "learning_rate": 5e-3} | self.settings),
        )
        trainer = transformers.Trainer(
            model=self.model,
            args=arguments,
            train_dataset=self.texts,
            eval_dataset=Texts(8, held_out=True),
            callbacks=list(callbacks),
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        self.best = trainer.state.best_model_checkpoint


def asked(texts: Texts) -> dict[str, Tensor]:
    return {"input_ids": texts.tokens[:3], "attention_mask": torch.ones(3, LENGTH).long()}


@pytest.mark.parametrize("is_bf16", [False, True])
def test_trainer(is_bf16: bool, tmp_path: Path) -> None:
    settings = {"bf16": is_bf16, "eval_strategy": "epoch"}
    program, memory = recorded(
        lambda: HuggingFace(tmp_path / "checkpoints", **settings),
        tmp_path / "run",
        tags=lambda input_ids, labels, **_: {"label": labels},
    )
    dual = certified(program.model, memory, steps=9, **asked(program.texts))
    head = memory.layer("classifier")
    assert sorted(head.patterns["label"]) == sorted(program.texts.labels.tolist() * 3)
    sums = dual.attend(layers="classifier", **asked(program.texts))["classifier"].sum_by("label")
    assert set(sums["label"]) == {0, 1}


def test_trainer_with_label_smoothing(tmp_path: Path) -> None:
    """It takes the labels out before the model is called: tags see what the model is given."""
    settings = {"label_smoothing_factor": 0.1}
    program, memory = recorded(
        lambda: HuggingFace(tmp_path / "checkpoints", **settings),
        tmp_path / "run",
        tags=lambda input_ids, **_: {"first": input_ids[:, 0]},
    )
    certified(program.model, memory, steps=9, **asked(program.texts))
    firsts = program.texts.tokens[:, 0].tolist() * 3
    assert sorted(memory.layer("classifier").patterns["first"]) == sorted(firsts)


ADAFACTOR = {"optim": "adafactor"}


def test_a_rule_from_elsewhere_that_is_named_as_one_of_torchs(tmp_path: Path) -> None:
    program, memory = recorded(
        lambda: HuggingFace(tmp_path / "checkpoints", **ADAFACTOR), tmp_path / "run"
    )
    certified(program.model, memory, steps=9, values=["*"], **asked(program.texts))


def test_a_rule_that_remembers_new_tensors_at_every_update(tmp_path: Path) -> None:
    program, memory = recorded(
        lambda: HuggingFace(tmp_path / "checkpoints", **ADAFACTOR), tmp_path / "run"
    )
    dual = dualform.DualForm(program.model, memory, optimizer=transformers.Adafactor)
    found = dual.verify(every_step=True)
    assert found.passed, found
    assert found.verdict == BITS


BEST = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "label_smoothing_factor": 0.1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "save_total_limit": 1,
    "learning_rate": 5e-2,
}


def test_trainer_puts_the_best_weights_back(tmp_path: Path) -> None:
    program, memory = recorded(
        lambda: HuggingFace(tmp_path / "checkpoints", **BEST), tmp_path / "run"
    )
    assert program.best.endswith("checkpoint-3")
    ends_before_other_weights(program, memory, steps=9, best=3, **asked(program.texts))


def test_trainer_puts_the_last_weights_back(tmp_path: Path) -> None:
    """They are the best ones: nothing is changed, and nothing to be said."""
    settings = BEST | {"greater_is_better": True}
    program, memory = recorded(
        lambda: HuggingFace(tmp_path / "checkpoints", **settings), tmp_path / "run"
    )
    assert program.best.endswith("checkpoint-9")
    assert memory.remarks == ()
    certified(program.model, memory, steps=9, **asked(program.texts))


def recording(path: Path, **options: Any) -> Any:
    """A callback of the Trainer's: it begins once a checkpoint is loaded, and ends with training,
    after the best weights were put back."""

    class Recording(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.recorder = dualform.record(given["model"], path, **options).start()

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.recorder.close()

    return Recording()


def test_a_recorder_in_a_callback(tmp_path: Path) -> None:
    make = lambda: HuggingFace(tmp_path / "checkpoints", **BEST)  # noqa: E731
    plain, then = alone(make)
    program = started(make)
    program.train(recording(tmp_path / "run"))
    assert draws() == then
    the_same_weights(program.model, plain.model)
    memory = dualform.Memory.open(tmp_path / "run")
    ends_before_other_weights(program, memory, steps=9, best=3, **asked(program.texts))


def test_resuming_from_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    """A run of three epochs dies after two, is resumed at the end of the first, and is the same."""
    place, settings = tmp_path / "checkpoints", {"save_strategy": "epoch"}

    class Dying(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 6:
                raise ZeroDivisionError

    plain, _ = alone(lambda: HuggingFace(place, **settings))
    dead = started(lambda: HuggingFace(place, **settings))
    first = recording(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        dead.train(first, Dying())
    first.recorder.close()
    program = started(lambda: HuggingFace(place, **settings))
    program.train(recording(tmp_path / "run", resume=True), checkpoint=str(place / "checkpoint-3"))
    the_same_weights(program.model, plain.model)
    memory = dualform.Memory.open(tmp_path / "run")
    assert len(memory.phases) == 2
    certified(program.model, memory, steps=9, **asked(program.texts))


class Accelerated:
    """accelerate's loop: a prepared optimizer that steps only where gradients are in sync."""

    def __init__(self) -> None:
        self.model = bert()
        self.texts = Texts(20)

    def train(self) -> None:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = AdamW(self.model.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
        loader = DataLoader(self.texts, batch_size=4, shuffle=True)
        model, optimizer, loader, schedule = accelerator.prepare(
            self.model, optimizer, loader, schedule
        )
        for _ in range(2):
            model.train()
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        accelerator.free_memory()


def test_accelerate(tmp_path: Path) -> None:
    program, memory = recorded(Accelerated, tmp_path / "run")
    certified(program.model, memory, steps=6, **asked(program.texts))
    assert memory.layer("classifier").rows == 2 * 20


class Adapters:
    """LoRA on attention's queries and values: everything else is frozen but the head."""

    def __init__(self) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(
            task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"]
        )
        self.model = peft.get_peft_model(bert(), config)
        self.texts = Texts(20)

    def train(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = AdamW(trained, lr=5e-3)
        loader = DataLoader(self.texts, batch_size=4, shuffle=True)
        self.model.train()
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                self.model(**batch).loss.backward()
                optimizer.step()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_lora(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    program, memory = recorded(Adapters, tmp_path / "run")
    dual = certified(program.model, memory, steps=10, **asked(program.texts))
    adapter = next(name for name in memory.layers if name.endswith("query.lora_A.default"))
    assert memory.layer(adapter).rows == 2 * 20 * LENGTH
    merged = dual.to_model().merge_and_unload()
    program.model.eval(), merged.eval()
    with torch.no_grad():
        outputs = [m(**asked(program.texts)).logits for m in (merged, program.model)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
