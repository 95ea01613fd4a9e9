//! Classification of the entries of a watched folder by name, and the completion marks of their writers.
//!
//! Conventions of the frameworks, from their sources:
//! - transformers: `checkpoint-N/` in place, `trainer_state.json` last by rank 0, while other ranks may still write their
//!   `rng_state_R.pth`; some versions wrote `tmp-checkpoint-N` and renamed it
//!   (<https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py>, `_save_checkpoint`);
//! - torch's DCP, and so torchtitan's `step-N/`: `*.distcp`, then `.metadata`, renamed from `.metadata.tmp`; without
//!   collectives each rank writes a `__R.metadata`
//!   (<https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/filesystem.py>, `finish`);
//! - `DeepSpeed`: `global_stepN/`, then the file `latest` beside it names it
//!   (<https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/engine.py>, `save_checkpoint`);
//! - Megatron: `iter_NNNNNNN/`, then `latest_checkpointed_iteration.txt` beside it holds N
//!   (<https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/checkpointing.py>);
//! - Lightning (`epoch=E-step=N.ckpt`), accelerate (`checkpoint_N/`) and plain `torch.save` write no marker.

use crate::clock::Timestamp;

/// Suffixes of checkpoint files.
const EXTENSIONS: [&str; 5] = [".pt", ".pth", ".bin", ".ckpt", ".safetensors"];
/// Words in temporary names, before a rename.
const TEMPORARY_WORDS: [&str; 7] = ["tmp", "temp", "part", "partial", "incomplete", "writing", "staging"];

/// Classification of an entry's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A checkpoint of this step.
    Step(u64),
    /// An entry with a temporary name, to be renamed when it is complete.
    Temporary,
    /// A checkpoint without a step number.
    Unnumbered,
    /// A copy of a checkpoint that no framework writes.
    Copy,
    /// Any other entry.
    Other,
}

/// Files that frameworks write beside their checkpoints, and that look like some: the arguments of Hugging Face's Trainer
/// (<https://huggingface.co/docs/transformers/main_classes/trainer>).
const BESIDE: [&str; 1] = ["training_args.bin"];

/// Words after the step in names that users give to copies of checkpoints.
const COPY_WORDS: [&str; 10] =
    ["backup", "bak", "bkp", "copy", "old", "orig", "original", "prev", "previous", "broken"];
/// Beginning of the names that `TowlineCallback` gives to checkpoints of a training that was given up
/// (`bindings/python/python/towline/transformers.py`).
const DROPPED: &str = "dropped-";

/// Classifies the entry called `name`.
pub(super) fn classify(name: &str, folder: bool) -> Class {
    if is_temporary(name) {
        return Class::Temporary;
    }
    if BESIDE.contains(&name) || name.starts_with(DROPPED) {
        return Class::Other;
    }
    let (stem, extension) = split(name);
    // `DIR/model-00001-of-00005.safetensors` is a part of the checkpoint DIR.
    if (!folder && extension.is_empty()) || words(stem).any(|word| word == "of") {
        return Class::Other;
    }
    match number(stem) {
        // A folder with a number is a checkpoint only with a suitable word: `version_0` and `runs-2` are none.
        Some(found) if folder && found.rank == Rank::Bare => Class::Other,
        Some(found) if found.is_of_copy() => Class::Copy,
        Some(found) => Class::Step(found.step),
        None if folder => Class::Other,
        None => Class::Unnumbered,
    }
}

/// The stem of `name`, and its extension if it is that of a checkpoint file.
fn split(name: &str) -> (&str, &str) {
    let extension = EXTENSIONS.iter().find(|end| name.ends_with(**end)).copied().unwrap_or_default();
    (name.strip_suffix(extension).unwrap_or(name), extension)
}

/// True for a name that says that the entry is a copy of a checkpoint, or was given up.
pub(super) fn is_set_aside(name: &str) -> bool {
    name.starts_with(DROPPED) || classify(name, true) == Class::Copy || classify(name, false) == Class::Copy
}

/// Name for the incomplete checkpoint `entry`, so that it is not taken for one.
pub(super) fn set_aside_name(entry: &str) -> String {
    format!("{DROPPED}{entry}")
}

/// Name of an entry without the version (`-v2`) that Lightning adds where the name is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BaseName<'a>(&'a str, &'a str);

/// The name without its version, and the version; 0 for one without.
pub(super) fn version(name: &str) -> (BaseName<'_>, u64) {
    let (stem, extension) = split(name);
    let versioned = stem.rsplit_once("-v").and_then(|(base, digits)| {
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        digits.parse().ok().filter(|_| is_number).map(|version| (BaseName(base, extension), version))
    });
    versioned.unwrap_or((BaseName(stem, extension), 0))
}

/// True for a file name with the ending of a checkpoint file.
pub(super) fn has_checkpoint_ending(name: &str) -> bool {
    EXTENSIONS.iter().any(|end| name.ends_with(end))
}

/// True if a watch treats a folder `name` as a checkpoint.
pub fn is_checkpoint(name: &str) -> bool {
    matches!(classify(name, true), Class::Step(_))
}

/// True for names of files that are still being written.
pub(super) fn is_temporary(name: &str) -> bool {
    name.starts_with('.') || name.ends_with('~') || words(name).any(|word| TEMPORARY_WORDS.contains(&&*word))
}

fn words(text: &str) -> impl Iterator<Item = String> {
    let parts = text.split(|c: char| !c.is_ascii_alphabetic());
    parts.filter(|part| !part.is_empty()).map(str::to_ascii_lowercase)
}

/// Likelihood that a number is the step, by the word before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Bare,
    Checkpoint,
    Epoch,
    Iteration,
    Step,
}

fn rank_of(word: &str) -> Rank {
    let ends = |ends: &[&str]| ends.iter().any(|end| word.ends_with(end));
    match word {
        _ if ends(&["step", "steps"]) => Rank::Step,
        "it" => Rank::Iteration,
        _ if ends(&["iter", "iteration", "iterations"]) => Rank::Iteration,
        "ep" => Rank::Epoch,
        _ if ends(&["epoch"]) => Rank::Epoch,
        _ if ends(&["checkpoint", "ckpt"]) => Rank::Checkpoint,
        _ => Rank::Bare,
    }
}

/// The number in a name that is most likely the step.
#[derive(Clone, Copy, Debug)]
struct Numbered<'a> {
    rank: Rank,
    step: u64,
    /// Rest of the name after the first number of this rank.
    rest: &'a str,
}

impl Numbered<'_> {
    /// True for the name of a copy: `checkpoint-5-backup`, `model_5 (1)`.
    fn is_of_copy(&self) -> bool {
        self.rest.contains([' ', '(']) || words(self.rest).any(|word| COPY_WORDS.contains(&&*word))
    }
}

/// The number in `stem` that is most likely the step, the last of equals. Neither decimals (`loss=0.31`) nor numbers that
/// belong to a word (`7b`, `fp16`, `v2`) are.
fn number(stem: &str) -> Option<Numbered<'_>> {
    let bytes = stem.as_bytes();
    let mut best: Option<Numbered<'_>> = None;
    let (mut at, mut word) = (0, "");
    while at < bytes.len() {
        let run = |of: fn(&u8) -> bool| at + bytes.iter().skip(at).take_while(|byte| of(byte)).count();
        let (letters, digits) = (run(u8::is_ascii_alphabetic), run(u8::is_ascii_digit));
        if letters > at {
            (word, at) = (stem.get(at..letters).unwrap_or_default(), letters);
            continue;
        }
        if digits == at {
            at += 1;
            continue;
        }
        let beside = |at: usize| bytes.get(at).copied().unwrap_or_default();
        let before = at.checked_sub(1).map(beside).unwrap_or_default();
        let after = beside(digits);
        let decimal = (after == b'.' && beside(digits + 1).is_ascii_digit())
            || (before == b'.' && at.checked_sub(2).map(beside).is_some_and(|byte| byte.is_ascii_digit()));
        let rank = rank_of(&word.to_ascii_lowercase());
        let of_a_word = after.is_ascii_alphabetic() || (before.is_ascii_alphabetic() && rank == Rank::Bare);
        let parsed = stem.get(at..digits).and_then(|digits| digits.parse().ok());
        if let Some(step) = parsed.filter(|_| !decimal && !of_a_word) {
            let rest = best.filter(|held| held.rank == rank).map(|held| held.rest);
            let rest = rest.unwrap_or_else(|| stem.get(digits..).unwrap_or_default());
            best = best.filter(|held| held.rank > rank).or(Some(Numbered { rank, step, rest }));
        }
        (word, at) = ("", digits);
    }
    best
}

/// A framework's marker of complete checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    /// No marker, as far as known.
    None,
    /// Incomplete: the framework will write this file at the end.
    Missing(&'static str),
    /// Complete since this time.
    Present(Timestamp),
}

/// Marker file of transformers.
pub(super) const TRAINER_STATE: &str = "trainer_state.json";
/// Marker file of DCP.
const METADATA: &str = ".metadata";

/// Search for the marker among the direct entries of a checkpoint folder.
#[derive(Debug, Default)]
pub(super) struct MarkerSearch {
    trainer: Option<Timestamp>,
    metadata: Option<Timestamp>,
    arguments: bool,
    parts: bool,
    by_rank: bool,
}

impl MarkerSearch {
    /// Adds the file `name`, with its modification time.
    pub(super) fn add(&mut self, name: &str, modified: Timestamp) {
        match name {
            TRAINER_STATE => self.trainer = Some(modified),
            METADATA => self.metadata = Some(modified),
            // The model is complete, but the optimizer and the trainer's state are not written yet.
            "training_args.bin" => self.arguments = true,
            _ if name.ends_with(".distcp") => self.parts = true,
            _ if name.starts_with("__") && name.ends_with(METADATA) => self.by_rank = true,
            _ => {}
        }
    }

    /// Marker of the folder whose files were added.
    pub(super) fn marker(&self) -> Marker {
        match self.trainer.or(self.metadata) {
            Some(modified) => Marker::Present(modified),
            None if self.arguments => Marker::Missing(TRAINER_STATE),
            None if self.parts && !self.by_rank => Marker::Missing(METADATA),
            None => Marker::None,
        }
    }
}

/// Tracker: a file beside the checkpoints with the name of the last complete one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tracker {
    /// `latest`: holds the folder's name.
    Latest,
    /// `latest_checkpointed_iteration.txt`: holds the number.
    Iteration,
}

impl Tracker {
    /// Every one there is.
    pub(super) const ALL: [Self; 2] = [Self::Latest, Self::Iteration];

    /// File name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Latest => "latest",
            Self::Iteration => "latest_checkpointed_iteration.txt",
        }
    }

    /// The marker with this file name.
    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tracker| tracker.name() == name)
    }

    /// The step that its `text` names.
    pub(super) fn step(self, text: &str) -> Option<u64> {
        match (self, classify(text.trim(), true)) {
            (Self::Latest, Class::Step(step)) => Some(step),
            (Self::Latest, _) => None,
            (Self::Iteration, _) => text.trim().parse().ok(),
        }
    }

    /// Content of the marker where `entry`, of `step`, is the last.
    pub(super) fn text(self, entry: &str, step: u64) -> String {
        match self {
            Self::Latest => entry.to_owned(),
            Self::Iteration => step.to_string(),
        }
    }

    /// True if it refers to folders with names like this one.
    pub(super) fn covers(self, entry: &str) -> bool {
        match self {
            Self::Latest => entry.starts_with("global_step"),
            Self::Iteration => entry.starts_with("iter_") || entry.starts_with("global_step_"),
        }
    }
}
