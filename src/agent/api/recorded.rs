//! Decisions about requests for names, in the audit log before anything is done.

use std::fmt::Display;

use axum::http::{Method, StatusCode};

use super::auth::HANDOFFS;
use super::caller::Caller;
use super::error::ApiError;
use crate::agent::state::AgentState;
use crate::audit::{Action, Decision, RECORDED_REQUESTS, Repeats, Request, Verdict};
use crate::cache::Pin;
use crate::error::{Error, ErrorKind, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::repository::Repository;

/// A request for a name.
#[derive(Debug)]
pub(super) struct AccessRequest<'a> {
    pub(super) caller: &'a Caller,
    pub(super) action: Action,
    /// The repository, if the request names one.
    pub(super) repository: Option<&'a Repository>,
    /// Repeats within a minute are one entry, as for the ranges of a file.
    pub(super) repeats: Repeats,
}

impl<'a> AccessRequest<'a> {
    /// A request that is recorded separately each time.
    pub(super) fn separate(caller: &'a Caller, action: Action, repository: Option<&'a Repository>) -> Self {
        Self { caller, action, repository, repeats: Repeats::Separate }
    }

    /// Records that the request for `name` is allowed.
    ///
    /// # Errors
    /// It cannot be recorded; then the request must be refused.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn allow(&self, state: &AgentState, name: impl Display) -> Result<Option<Request>> {
        let rule = if self.action == Action::Handoff { "[[handoff.accept]]" } else { self.caller.rule() };
        let decision = self.decision(state, Some(name.to_string()), Verdict::Allow, rule.to_owned());
        state.record(decision, self.repeats).await
    }

    /// Records that `asked`, another agent, is asked for `name`; `details` follow the rule.
    ///
    /// # Errors
    /// As [`AccessRequest::allow`].
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn forward(
        &self,
        state: &AgentState,
        name: Option<&str>,
        asked: &Identity,
        details: &str,
    ) -> Result<Option<Request>> {
        let rule = format!("{}{details}", self.caller.rule());
        let decision = self.decision(state, name.map(str::to_owned), Verdict::Allow, rule);
        let (to, asked) = (Some(asked.site().to_owned()), Some(asked.to_string()));
        state.record(Decision { to, asked, ..decision }, self.repeats).await
    }

    /// Records that `pin` ends.
    ///
    /// # Errors
    /// As [`AccessRequest::allow`].
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn end_pin(&self, state: &AgentState, pin: &Pin) -> Result<Option<Request>> {
        // A pin does not tell its name; its reason is whatever its owner wrote.
        let rule = format!("{}; pin {} of {}: {}", self.caller.rule(), pin.id, pin.owner, pin.reason);
        state.record(self.decision(state, None, Verdict::Allow, rule), self.repeats).await
    }

    /// Records that the request for `name` was refused with `error`, if that is a refusal; returns the error.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn refuse(&self, state: &AgentState, name: impl Display, error: Error) -> Error {
        // Forbidden names are reported as absent to other agents and tokens.
        let absent = error.kind() == ErrorKind::NotFound && self.caller.requester().is_some();
        // A quota of [[handoff.accept]] is a rule, too.
        let over_quota = error.kind() == ErrorKind::Exhausted && self.action == Action::Handoff;
        if !absent && !over_quota && error.kind() != ErrorKind::Denied {
            return error;
        }
        let listed = self.caller.requester().is_none()
            || state.denied_names.admit(&format!("{:?}", self.caller.actor()), state.now());
        let decision = if listed {
            self.decision(state, Some(name.to_string()), Verdict::Deny, error.to_string())
        } else {
            self.decision(state, None, Verdict::Deny, "refused, as many names before in this minute".to_owned())
        };
        // It is refused in any case.
        state.record(decision, Repeats::Merged).await.err().unwrap_or(error)
    }

    fn decision(&self, state: &AgentState, name: Option<String>, verdict: Verdict, rule: String) -> Decision {
        let site = || state.credentials().ok().map(|credentials| credentials.identity().site().to_owned());
        let to = match self.action {
            // Bytes come to this node.
            Action::Read | Action::Warm | Action::Restore | Action::Handoff => site(),
            _ => None,
        };
        Decision {
            actor: self.caller.actor(),
            action: self.action,
            name,
            manifest: None,
            repository: self.repository.map(|repository| repository.id().to_string()),
            to,
            asked: None,
            verdict,
            rule,
        }
    }
}

/// Records that a call of another agent about names was refused with `error`, before it was read; returns the error.
///
/// # Cancel safety
/// Safe.
pub(super) async fn refuse_call(
    state: &AgentState,
    caller: &Caller,
    (method, path): (&Method, &str),
    error: ApiError,
) -> ApiError {
    let Some(action) = action_of(method, path) else { return error };
    if caller.agent().is_none() || error.error().kind() != ErrorKind::Denied {
        return error;
    }
    let refused = AccessRequest { caller, action, repository: None, repeats: Repeats::Merged };
    let decision = refused.decision(state, None, Verdict::Deny, error.error().to_string());
    // It is refused in any case.
    state.record(decision, Repeats::Merged).await.err().map_or(error, ApiError::from)
}

/// Checks that a request of a caller with limited rights, which the audit log records by itself, is within the caller's limit: its
/// entries must not fill the disk.
///
/// # Errors
/// Too many requests, if it is not.
pub(super) fn check_rate(state: &AgentState, caller: &Caller, method: &Method, path: &str) -> Result<(), ApiError> {
    if action_of(method, path).is_none() {
        return Ok(());
    }
    check_entries(state, caller, 1)
}

/// As [`check_rate`], for a request with `entries` of its own in the audit log.
///
/// # Errors
/// As [`check_rate`].
pub(super) fn check_entries(state: &AgentState, caller: &Caller, entries: u32) -> Result<(), ApiError> {
    if caller.requester().is_none() || state.recorder.is_none() {
        return Ok(());
    }
    admitted(state.recorded_requests.admit_several(&format!("{:?}", caller.actor()), entries, state.now()))
}

/// As [`check_rate`], for a read of `name`, whose repeats within a minute are one entry.
///
/// # Errors
/// As [`check_rate`].
pub(super) fn check_read(state: &AgentState, caller: &Caller, name: &Name) -> Result<(), ApiError> {
    if caller.requester().is_none() || state.recorder.is_none() {
        return Ok(());
    }
    admitted(state.recorded_requests.admit_once(&format!("{:?}", caller.actor()), name.as_str(), state.now()))
}

fn admitted(within_limit: bool) -> Result<(), ApiError> {
    if within_limit {
        return Ok(());
    }
    let error = Error::exhausted("too many requests for names in this minute")
        .expected(format!("at most {RECORDED_REQUESTS}, as each has an entry in the audit log"))
        .help("try again in a minute");
    Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, error))
}

/// Action of a call about a name; none: it is about none.
fn action_of(method: &Method, path: &str) -> Option<Action> {
    match (method, path) {
        (&Method::POST, "/v1/warm" | "/v1/fetch") => Some(Action::Warm),
        (&Method::POST, "/v1/save") => Some(Action::Save),
        (&Method::POST, "/v1/pins") => Some(Action::Pin),
        (&Method::DELETE, path) if path.starts_with("/v1/pins/") => Some(Action::Unpin),
        (&Method::POST, path) if path.starts_with("/v1/hints/") => Some(Action::Pin),
        (_, path) if path.starts_with(HANDOFFS) => Some(Action::Handoff),
        _ => None,
    }
}
