//! Steps in several files or folders beside each other, one for each rank or part. None of them alone is the step.
//!
//! Frameworks put such files in a folder for each step: `mp_rank_00_model_states.pt` and `zero_pp_rank_0_..._optim_states.pt` of
//! `DeepSpeed`, `mp_rank_00/` of Megatron, `model-00001-of-00005.safetensors` of Hugging Face. Beside each other they come from
//! trainings that call `torch.save` on each rank.

use std::collections::{BTreeMap, BTreeSet};

use super::candidate::part;
use super::events::WatchFailure;
use crate::error::Error;

/// Maximum entries that a message names.
const NAMED_MAX: usize = 4;

/// Entries of one step that differ only in the rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PartedStep {
    pub(super) step: u64,
    pub(super) entries: BTreeSet<String>,
}

impl PartedStep {
    /// Finds the steps in parts among checkpoints, by their names and steps: entries whose numbers of ranks follow each other, or
    /// whose names say that there are others. A name alone does not tell: `lora_rank16_step_5` is a whole model, and so may be
    /// `step_5_rank0`.
    pub(super) fn among<'a>(checkpoints: impl Iterator<Item = (&'a str, u64)>) -> Vec<Self> {
        let mut found: BTreeMap<String, (BTreeSet<u64>, bool, Self)> = BTreeMap::new();
        for (entry, step) in checkpoints {
            let Some(part) = part(entry) else { continue };
            let empty = || (BTreeSet::new(), false, Self { step, entries: BTreeSet::new() });
            let (numbers, has_others, parted) = found.entry(part.others).or_insert_with(empty);
            numbers.insert(part.number);
            *has_others |= part.has_others;
            parted.entries.insert(entry.to_owned());
        }
        let follow =
            |numbers: &BTreeSet<u64>| numbers.iter().zip(numbers.iter().skip(1)).any(|(one, next)| next - one == 1);
        let parted = found.into_values().filter(|(numbers, has_others, _)| *has_others || follow(numbers));
        parted.map(|(.., parted)| parted).collect()
    }

    /// Entry by which it is told.
    pub(super) fn first(&self) -> &str {
        self.entries.first().map(String::as_str).unwrap_or_default()
    }

    /// Reason for which nothing is saved.
    pub(super) fn reason(&self) -> String {
        let mut named: Vec<&str> = self.entries.iter().take(NAMED_MAX).map(String::as_str).collect();
        if self.entries.len() > NAMED_MAX {
            named.push("...");
        }
        let named = named.join(", ");
        match self.entries.len() {
            1 => format!(
                "it is one of several parts of step {} by its name, and the others are not here: a watch saves whole steps",
                self.step
            ),
            parts => format!(
                "it is one of {parts} parts of step {} that are not in a folder of their own ({named}): a watch saves whole steps",
                self.step
            ),
        }
    }

    /// The failure that this is for the command.
    pub(super) fn failure(&self) -> WatchFailure {
        let help = format!(
            "let all ranks write to one folder for each step, such as step-{}/; or move the files to one and `towline save` it",
            self.step
        );
        WatchFailure::from(&Error::usage(self.reason()).at(self.first()).help(help))
    }
}
