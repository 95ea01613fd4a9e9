//! Outcomes of tasks.

use std::sync::Arc;

use serde::Serialize;

use crate::agent::staged::StageReport;
use crate::agent::view::{CacheChecked, TaskState};
use crate::agent::warm::Warmed;
use crate::error::{Error, ErrorKind};
use crate::name::Name;
use crate::ops::{RestoreReport, SaveReport};

/// End of a task.
#[derive(Clone, Debug)]
pub(in crate::agent) enum Outcome {
    Done(Arc<TaskReport>),
    Failed(Arc<Error>),
    /// Stopped. The error says what it left behind, if the task ended by itself.
    Cancelled(Option<Arc<Error>>),
}

/// Report of a task, in JSON as the command of that name prints it.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(in crate::agent) enum TaskReport {
    Save(Box<SaveReport>),
    /// A handed-off checkpoint that the repository holds.
    AlreadySaved {
        name: Name,
        saved: Already,
    },
    Restore(Box<RestoreReport>),
    Warm(Box<Warmed>),
    Stage(Box<StageReport>),
    /// Inputs of a committed hint.
    Committed {
        hint_id: String,
        inputs: Vec<Warmed>,
    },
    /// Names that a watch saved.
    Watch {
        saved: Vec<String>,
    },
    CacheCheck(CacheChecked),
}

/// The word `already`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::agent) enum Already {
    Already,
}

impl Outcome {
    /// Outcome of work that returned `result`; `stopped` if a stop was requested before.
    pub(super) fn of(result: Result<TaskReport, Error>, stopped: bool) -> Self {
        match result {
            Ok(report) => Self::Done(Arc::new(report)),
            Err(error) if error.kind() == ErrorKind::Cancelled && stopped => Self::Cancelled(Some(Arc::new(error))),
            Err(error) => Self::Failed(Arc::new(error)),
        }
    }

    pub(super) fn state(&self) -> TaskState {
        match self {
            Self::Done(_) => TaskState::Done,
            Self::Failed(_) => TaskState::Failed,
            Self::Cancelled(_) => TaskState::Cancelled,
        }
    }

    /// Error of a task that is not done.
    pub(super) fn error(&self) -> Option<&Error> {
        match self {
            Self::Done(_) => None,
            Self::Failed(error) => Some(error),
            Self::Cancelled(error) => error.as_deref(),
        }
    }
}
