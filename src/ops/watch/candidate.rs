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
//! - Orbax: `N/`, renamed from `N.orbax-checkpoint-tmp-T`
//!   (<https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html>);
//! - Lightning (`epoch=E-step=N.ckpt`), accelerate (`checkpoint_N/`) and plain `torch.save` write no marker.

use std::ops::Range;

use crate::clock::Timestamp;

/// Suffixes of checkpoint files.
const EXTENSIONS: [&str; 5] = [".pt", ".pth", ".bin", ".ckpt", ".safetensors"];
/// Words in temporary names, before a rename.
const TEMPORARY_WORDS: [&str; 6] = ["tmp", "temp", "partial", "incomplete", "writing", "staging"];
/// Word in temporary names, unless a number follows it (`model_part1`).
const PART: &str = "part";
/// Words before the number of a rank, or of a part of a step.
const PART_WORDS: [&str; 9] = ["rank", "shard", PART, "dp", "tp", "pp", "worker", "process", "consolidated"];
/// Words before a number of ranks or parts.
const COUNT_WORDS: [&str; 5] = ["of", "world", "size", "ranks", "shards"];

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
    /// Other state that a framework saves with a model, and no checkpoint by itself.
    Beside,
    /// Any other entry.
    Other,
}

/// Files that frameworks write beside their checkpoints, and that look like some: the arguments of Hugging Face's Trainer
/// (<https://huggingface.co/docs/transformers/main_classes/trainer>).
const BESIDE: [&str; 1] = ["training_args.bin"];

/// First words of the names of files with other states than that of a model.
const STATE_WORDS: [&str; 8] = ["optimizer", "optim", "scheduler", "sched", "rng", "scaler", "sampler", "ema"];

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
    if !folder && extension.is_empty() {
        return Class::Other;
    }
    if !folder && is_other_state(stem) {
        return Class::Beside;
    }
    // `DIR/model-00001-of-00005.safetensors` is a part of the checkpoint DIR.
    let is_part = words(stem).any(|word| word == "of");
    match number(stem) {
        Some(found) if folder && is_number(name) => Class::Step(found.step),
        // With other words a folder with a number is none: `version_0` and `runs-2`.
        Some(found) if (folder || is_part) && found.rank == Rank::Bare => Class::Other,
        Some(found) if found.is_of_copy() => Class::Copy,
        Some(found) => Class::Step(found.step),
        None if folder || is_part => Class::Other,
        None => Class::Unnumbered,
    }
}

/// True for a name that is a number alone, as Orbax names the folders of steps.
pub(super) fn is_number(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit())
}

/// True for the files that mark the folder that they are in as a checkpoint, or a part of one.
pub(super) fn is_within_checkpoint(name: &str) -> bool {
    [METADATA, "_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"].contains(&name)
}

/// True for `optimizer_1`, `lr_scheduler`, `random_states_0`, but not for `optimizer=adamw-step=5`.
fn is_other_state(stem: &str) -> bool {
    let words: Vec<String> = words(stem).collect();
    let rest = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["lr", word, ..] if STATE_WORDS.contains(&word) => 2,
        ["random", word, ..] if word.starts_with("state") => 1,
        [word, ..] if STATE_WORDS.contains(&word) => 1,
        _ => return false,
    };
    let follows = words.get(rest).map(String::as_str).unwrap_or_default();
    follows.is_empty() || follows.starts_with("state") || rank_of(follows) > Rank::Bare || PART_WORDS.contains(&follows)
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
    let is_numbered = |number: &Number<'_>| number.is_after(&[PART]);
    let parts = words(name).filter(|word| word == PART).count();
    name.starts_with('.')
        || name.ends_with('~')
        || words(name).any(|word| TEMPORARY_WORDS.contains(&&*word))
        || (parts > 0 && parts > numbers(name).iter().filter(|number| is_numbered(number)).count())
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

/// A number in a name.
struct Number<'a> {
    /// The name before it, and after it.
    before: &'a str,
    after: &'a str,
    digits: &'a str,
    /// The word before it.
    word: &'a str,
}

impl Number<'_> {
    /// True if the word before it is one of `words`.
    fn is_after(&self, words: &[&str]) -> bool {
        words.contains(&&*self.word.to_ascii_lowercase())
    }

    /// Number of parts that it is one of, as in `00001-of-00004`; none for a step of steps.
    fn of(&self) -> Option<u64> {
        let separators = ['-', '_', '.'];
        let rest = self.after.trim_start_matches(separators).strip_prefix("of")?.trim_start_matches(separators);
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        digits.parse().ok().filter(|_| rank_of(&self.word.to_ascii_lowercase()) <= Rank::Checkpoint)
    }

    /// True for the number of a rank or of a part.
    fn is_part(&self) -> bool {
        self.is_after(&PART_WORDS) || self.of().is_some()
    }

    /// True for a decimal, and for a number that belongs to a word.
    fn is_within(&self, rank: Rank) -> bool {
        let (before, after) = (self.before.as_bytes(), self.after.as_bytes());
        let decimal = matches!(after, [b'.', digit, ..] if digit.is_ascii_digit())
            || matches!(before, [.., digit, b'.'] if digit.is_ascii_digit());
        let of_a_word = after.first().is_some_and(u8::is_ascii_alphabetic)
            || (before.last().is_some_and(u8::is_ascii_alphabetic) && rank == Rank::Bare);
        decimal || of_a_word
    }
}

fn numbers(stem: &str) -> Vec<Number<'_>> {
    let bytes = stem.as_bytes();
    let (mut found, mut at, mut word) = (Vec::new(), 0, "");
    while at < bytes.len() {
        let run = |of: fn(&u8) -> bool| at + bytes.iter().skip(at).take_while(|byte| of(byte)).count();
        let (letters, end) = (run(u8::is_ascii_alphabetic), run(u8::is_ascii_digit));
        if letters > at {
            (word, at) = (stem.get(at..letters).unwrap_or_default(), letters);
            continue;
        }
        if end == at {
            at += 1;
            continue;
        }
        let text = |range: Range<usize>| stem.get(range).unwrap_or_default();
        found.push(Number { before: text(0..at), after: text(end..stem.len()), digits: text(at..end), word });
        (word, at) = ("", end);
    }
    found
}

/// The number in `stem` that is most likely the step, the last of equals. Neither decimals (`loss=0.31`) nor numbers that
/// belong to a word (`7b`, `fp16`, `v2`) are, nor those of ranks and parts.
fn number(stem: &str) -> Option<Numbered<'_>> {
    let mut best: Option<Numbered<'_>> = None;
    for number in numbers(stem) {
        let rank = rank_of(&number.word.to_ascii_lowercase());
        if number.is_within(rank) || number.is_part() || number.is_after(&COUNT_WORDS) {
            continue;
        }
        let Ok(step) = number.digits.parse() else { continue };
        let rest = best.filter(|held| held.rank == rank).map(|held| held.rest);
        let rest = rest.unwrap_or(number.after);
        best = best.filter(|held| held.rank > rank).or(Some(Numbered { rank, step, rest }));
    }
    best
}

/// A name that is of one rank or part.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The name with `*` for its numbers of ranks and parts.
    pub(super) others: String,
    /// Sum of the numbers of ranks and parts: those of ranks 0 and 1 follow each other, those of models of rank 8 and 16 do not.
    pub(super) number: u64,
    /// True if the name says that there are others.
    pub(super) has_others: bool,
}

/// The part of a checkpoint that `name` says it is; none for a whole one.
pub(super) fn part(name: &str) -> Option<Part> {
    let (stem, extension) = split(name);
    let (mut others, mut sum, mut has_others, mut end) = (String::new(), 0_u64, false, 0);
    for number in numbers(stem).into_iter().filter(Number::is_part) {
        others += stem.get(end..number.before.len()).unwrap_or_default();
        others.push('*');
        end = number.before.len() + number.digits.len();
        has_others |= number.of().is_some_and(|parts| parts != 1);
        sum = sum.saturating_add(number.digits.parse().unwrap_or(u64::MAX));
    }
    let rest = stem.get(end..).unwrap_or_default();
    (end > 0).then(|| Part { others: others + rest + extension, number: sum, has_others })
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
