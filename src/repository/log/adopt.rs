//! Adoption of entries that follow entries which are lost: as many of their actions as still fit.

use std::collections::HashSet;

use super::attempt::Attempt;
use super::{Action, LogEntry, Salvaged, State};
use crate::clock::Timestamp;
use crate::error::Result;
use crate::id::WriteId;
use crate::repository::layout::Numbered;

/// Counts an unreadable entry, without effect on the state.
pub(super) fn pass_over(state: &mut State) {
    let nothing = LogEntry { write: WriteId::random(), session: None, at: Timestamp(0), actions: Vec::new() };
    // Without actions, nothing can be refused.
    let _ = state.apply(&nothing);
}

/// Applies `entry` as far as possible. Because it was committed, its session must have been open, and its names must have had the
/// versions that it expects. Returns the memory that [`State::apply_weighed`] does.
///
/// # Errors
/// Exhausted, if what is lost takes more memory than it may.
pub(super) fn adopt(state: &mut State, entry: &LogEntry, salvaged: &mut Salvaged) -> Result<u64> {
    if let Ok(kept) = state.apply_weighed(entry) {
        return Ok(kept);
    }
    let key = Numbered::Entry.key(state.seq + 1);
    if let Some(session) = entry.session {
        state.reopen(session, entry.write);
    }
    let (actions, refused) = fitting_actions(state, entry);
    let mut partial = false;
    for action in refused {
        match action {
            Action::SetRef { name, .. } | Action::RemoveRef { name, .. } | Action::Keep { name, .. } => {
                salvaged.note_name(name)?;
            }
            // Sessions are opened again, and what is not kept need not be forgotten.
            Action::Open(_) | Action::Renew(_) | Action::Close(_) | Action::Fence { .. } | Action::Forget { .. } => {}
            _ => partial = true,
        }
    }
    let adopted = LogEntry { write: entry.write, session: entry.session, at: entry.at, actions };
    let applied = state.apply_weighed(&adopted);
    if applied.is_err() {
        partial = true;
        pass_over(state);
    }
    if partial {
        salvaged.note_partial(key)?;
    }
    Ok(applied.unwrap_or(0))
}

/// The actions of `entry`, whose session is open, that may follow `state` once they expect it, and the others. Each is checked
/// once, by itself: no action of an entry makes the state refuse another one.
fn fitting_actions<'a>(state: &State, entry: &'a LogEntry) -> (Vec<Action>, Vec<&'a Action>) {
    let attempts = state.sessions.values().filter_map(|session| Some(&session.joint.as_ref()?.attempt));
    let attempts: HashSet<&Attempt> = attempts.collect();
    let (mut fit, mut refused) = (Vec::new(), Vec::new());
    for action in &entry.actions {
        let fitted = fitting(state, action);
        let is_second = matches!(&fitted, Action::OpenJoint(_, attempt) if attempts.contains(attempt));
        if is_second || state.check_alone(entry.session, &fitted).is_err() {
            refused.push(action);
        } else {
            fit.push(fitted);
        }
    }
    (fit, refused)
}

/// The same change, but expecting the known state: the new value of a name does not depend on its old one.
fn fitting(state: &State, action: &Action) -> Action {
    match action.clone() {
        Action::SetRef { name, value, .. } => Action::SetRef { expected: state.version(&name), name, value },
        Action::RemoveRef { name, expected } => {
            Action::RemoveRef { expected: state.version(&name).unwrap_or(expected), name }
        }
        Action::Keep { name, version } => Action::Keep { version: state.version(&name).unwrap_or(version), name },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::super::attempt::AttemptId;
    use super::*;
    use crate::id::{ObjectId, Owned, PackId, SessionId};
    use crate::name::Name;
    use crate::repository::log::RefValue;
    use crate::repository::runs::tests::value;

    fn entry(session: Option<SessionId>, actions: Vec<Action>) -> LogEntry {
        LogEntry { write: WriteId::random(), session, at: Timestamp(0), actions }
    }

    /// Adds one action after the other, and asks about all of those so far each time.
    fn fitting_by_definition(state: &State, entry: &LogEntry) -> Vec<Action> {
        let mut adopted = LogEntry { actions: Vec::new(), ..entry.clone() };
        for action in &entry.actions {
            adopted.actions.push(fitting(state, action));
            if state.check(&adopted).is_err() {
                adopted.actions.pop();
            }
        }
        adopted.actions
    }

    #[test]
    fn actions_that_fit_do_so_beside_all_others() {
        let [mine, other, condemned] = [(); 3].map(|()| SessionId::random());
        let name = |text: &str| text.parse::<Name>().unwrap();
        let attempt = |text: &str| Attempt { name: name(text), id: AttemptId::default(), ranks: NonZeroU32::MIN };
        let set = |text: &str| {
            let value: RefValue = value(0, &[]);
            Action::SetRef { name: name(text), expected: Some(77), value }
        };
        let condemn = |session, damaged| Action::Condemn { pack: Owned::fresh(session), len: 1, damaged };
        let mut state = State::default();
        let first = |text: &str| match set(text) {
            Action::SetRef { name, value, .. } => Action::SetRef { name, expected: None, value },
            action => action,
        };
        let opened = vec![
            Action::Open(mine),
            Action::Open(condemned),
            Action::OpenJoint(other, attempt("run/1")),
            first("a"),
            condemn(condemned, true),
        ];
        state.apply(&entry(Some(mine), opened)).unwrap();
        let actions = vec![
            condemn(mine, false),
            Action::Open(other),
            Action::OpenJoint(SessionId::random(), attempt("run/1")),
            set("a"),
            Action::OpenJoint(SessionId::random(), attempt("run/2")),
            Action::SwapMap { old: Owned::fresh(mine), new: Owned::fresh(mine) },
            Action::RemoveRef { name: name("b"), expected: 1 },
            condemn(other, true),
            set("c"),
            Action::Keep { name: name("a"), version: 9 },
            Action::Forget { name: name("a"), version: 1, at: 1 },
            Action::Close(mine),
        ];
        for session in [None, Some(mine), Some(condemned)] {
            let entry = entry(session, actions.clone());
            let (fit, refused) = fitting_actions(&state, &entry);
            assert_eq!(fit, fitting_by_definition(&state, &entry), "{session:?}");
            assert_eq!(fit.len() + refused.len(), actions.len());
            assert!(!fit.is_empty() && !refused.is_empty());
        }
    }

    /// It would take minutes if each action were checked together with all before it, or with all sessions.
    #[test]
    fn very_many_actions_are_adopted_in_linear_time() {
        let count = 200_000u32;
        let attempt = |number: u32| Attempt {
            name: format!("run/{number}").parse().unwrap(),
            id: AttemptId::default(),
            ranks: NonZeroU32::MIN,
        };
        let session = SessionId::random();
        let mut state = State::default();
        let joint = |number| Action::OpenJoint(SessionId::random(), attempt(number));
        state.apply(&entry(None, (0..count / 4).map(joint).collect())).unwrap();
        let condemn = |number: u32| {
            let mut id = [0; 16];
            id[..4].copy_from_slice(&number.to_be_bytes());
            let pack = PackId { session, object: ObjectId::from_bytes(id) };
            Action::Condemn { pack, len: 1, damaged: false }
        };
        let actions = (0..count).map(condemn).chain((count..count + count / 4).map(joint));
        // One that is refused, so that they are adopted.
        let entry = entry(None, actions.chain([Action::Renew(session)]).collect());
        let (fit, refused) = fitting_actions(&state, &entry);
        assert_eq!((fit.len() + 1, refused), (entry.actions.len(), vec![&Action::Renew(session)]));
    }
}
