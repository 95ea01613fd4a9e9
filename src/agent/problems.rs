//! Problems of background work, each as long as it lasts: `towline top` shows them, and `towline_problems` counts them.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Problems by what has them.
#[derive(Debug, Default)]
pub(super) struct Problems(Mutex<BTreeMap<&'static str, String>>);

impl Problems {
    /// Sets the problem of `what`. Returns true if it had none.
    pub(super) fn set(&self, what: &'static str, problem: String) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(what, problem).is_none()
    }

    /// Ends the problem of `what`, if it has one.
    pub(super) fn clear(&self, what: &'static str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(what);
    }

    /// All of them, for people.
    pub(super) fn list(&self) -> Vec<String> {
        let problems = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        problems.iter().map(|(what, problem)| format!("{what}: {problem}")).collect()
    }
}
