//! Failures that a task survives.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::error::ErrorKind;

/// Failures that a running task retries, as a watch does. Clones share them.
#[derive(Clone, Debug, Default)]
pub(in crate::agent) struct Failures(Arc<Mutex<FailureList>>);

#[derive(Debug, Default)]
struct FailureList {
    /// Failures that were not cleared, the latest last.
    current: Vec<Failure>,
    count: u64,
}

/// A failure that is retried.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    subject: String,
    kind: ErrorKind,
    pub(super) message: String,
}

impl Failure {
    /// The error that a task shows.
    pub(super) fn to_json(&self) -> Value {
        json!({ "kind": self.kind.word(), "message": self.message })
    }
}

impl Failures {
    /// Counts a failure about `subject`, shown until it is cleared.
    pub(in crate::agent) fn record(&self, subject: &str, kind: ErrorKind, message: String) {
        self.clear(subject);
        let mut list = self.list();
        list.current.push(Failure { subject: subject.to_owned(), kind, message });
        list.count += 1;
    }

    /// Clears the failure about `subject`.
    pub(in crate::agent) fn clear(&self, subject: &str) {
        self.list().current.retain(|failure| failure.subject != subject);
    }

    pub(super) fn count(&self) -> u64 {
        self.list().count
    }

    /// The latest failure that was not cleared.
    pub(super) fn last(&self) -> Option<Failure> {
        self.list().current.last().cloned()
    }

    fn list(&self) -> MutexGuard<'_, FailureList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
