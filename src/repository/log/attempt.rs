//! Joint sessions: log records by which the ranks of one attempt to save a step find their shared session.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use super::fields::read_name;
use crate::error::{Error, Result};
use crate::format::wire::{Reader, Writer};
use crate::limits::ATTEMPT_LEN_MAX;
use crate::name::Name;
use crate::name::is_segment;

/// Id of an attempt to save a step, chosen by the launcher of the ranks, and equal on all of them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptId(String);

/// One attempt of a number of ranks to save one step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attempt {
    /// Name of the step.
    pub name: Name,
    /// Id.
    pub id: AttemptId,
    /// Number of ranks; another number makes another attempt.
    pub ranks: NonZeroU32,
}

/// Purpose of an open, shared session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Joint {
    /// The attempt.
    pub attempt: Attempt,
    /// Version of the name when the session opened, which the commit must expect.
    pub expected: Option<u64>,
}

impl AttemptId {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// True if the id itself says that there are `parts` parts, by the suffix `-of-PARTS`: then the world size may be another number,
    /// as where a rank saves several parts.
    #[must_use]
    pub fn says_parts(&self, parts: NonZeroU32) -> bool {
        self.0.strip_suffix(&parts.to_string()).is_some_and(|rest| rest.ends_with("-of-"))
    }
}

impl Default for AttemptId {
    fn default() -> Self {
        Self("0".to_owned())
    }
}

impl FromStr for AttemptId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.len() <= ATTEMPT_LEN_MAX && is_segment(text) {
            return Ok(Self(text.to_owned()));
        }
        Err(Error::usage("invalid id of an attempt")
            .expected(format!("[A-Za-z0-9._+=-], at most {ATTEMPT_LEN_MAX} bytes"))
            .got(format!("{text:?}"))
            .help("for example: 4711.0, the job's number and how often it was restarted"))
    }
}

impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Attempt {
    pub(super) fn write(&self, out: &mut Writer) {
        out.string(self.name.as_str().as_bytes()).string(self.id.0.as_bytes()).varint(self.ranks.get().into());
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let (name, id) = (read_name(reader)?, read_id(reader)?);
        let id = id.ok_or_else(|| reader.malformed("attempt has no name"))?;
        let ranks = NonZeroU32::new(reader.varint32()?);
        Ok(Self { name, id, ranks: ranks.ok_or_else(|| reader.malformed("attempt has no ranks"))? })
    }
}

/// Writes an optional id; none is written as an empty text.
pub(super) fn write_id(out: &mut Writer, id: Option<&AttemptId>) {
    out.string(id.map_or("", AttemptId::as_str).as_bytes());
}

/// Reads what [`write_id`] wrote.
pub(super) fn read_id(reader: &mut Reader<'_>) -> Result<Option<AttemptId>> {
    let text = reader.text(ATTEMPT_LEN_MAX)?;
    reader.keep(text.len())?;
    if text.is_empty() {
        return Ok(None);
    }
    let id = text.parse().map_err(|error: Error| Error::damaged("log holds a bad attempt").source(error));
    id.map(Some)
}

impl Joint {
    pub(super) fn write(&self, out: &mut Writer) {
        self.attempt.write(out);
        out.varint(self.expected.map_or(0, |version| version + 1));
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { attempt: Attempt::read(reader)?, expected: reader.varint()?.checked_sub(1) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::state::State;
    use super::super::values::RefValue;
    use super::super::{Action, LogEntry};
    use super::*;
    use crate::clock::Timestamp;
    use crate::id::SessionId;
    use crate::id::WriteId;
    use crate::id::{ManifestId, Owned};
    use crate::repository::log::StepFacts;

    /// Attempt `n`: two names, two ids, two world sizes.
    fn attempt(n: u8) -> Attempt {
        let (name, id) = (format!("run/step-{}", n % 2), (n / 2 % 2).to_string());
        let ranks = NonZeroU32::new(u32::from(n / 4 % 2) + 1).unwrap();
        Attempt { name: name.parse().unwrap(), id: id.parse().unwrap(), ranks }
    }

    fn value(facts: StepFacts, attempt: Option<AttemptId>) -> RefValue {
        let (manifest, key) = (ManifestId::of(b""), Owned::fresh(session(0)));
        RefValue {
            version: 0,
            manifest,
            manifest_key: key,
            map_key: key,
            saved: Timestamp(0),
            logical_bytes: 0,
            files: 0,
            chunks: 0,
            behind: 0,
            facts,
            attempt,
        }
    }

    fn session(n: u8) -> SessionId {
        SessionId::from_bytes([n; 16])
    }

    /// Actions on attempt `n`: open a session for it, make it complete, end it, or move its name.
    fn actions(state: &State, (what, n, fresh): (u8, u8, u8)) -> (Option<SessionId>, Vec<Action>) {
        let attempt = attempt(n);
        let name = attempt.name.clone();
        let set = |expected, of: Option<&Attempt>| {
            let facts = of.map_or_else(StepFacts::default, |of| StepFacts::default().world_size(of.ranks));
            let value = value(facts, of.map(|of| of.id.clone()));
            Action::SetRef { name: name.clone(), expected, value }
        };
        match (what, state.joint(&attempt)) {
            (0, _) => (Some(session(fresh)), vec![Action::OpenJoint(session(fresh), attempt)]),
            (1, Some((id, _, joint))) => (Some(id), vec![set(joint.expected, Some(&attempt)), Action::Close(id)]),
            (2, Some((id, open, _))) => (None, vec![Action::Fence { session: id, touched: open.touched }]),
            _ => (None, vec![set(state.version(&name), None)]),
        }
    }

    proptest! {
        #[test]
        fn an_attempt_has_one_session_and_is_complete_once(deeds in prop::collection::vec((0u8..4, 0u8..8, 0u8..20), 0..60)) {
            let mut state = State::default();
            for deed in deeds {
                let (session, actions) = actions(&state, deed);
                let entry = LogEntry { write: WriteId::random(), session, at: Timestamp(0), actions };
                prop_assert_eq!(&LogEntry::decode(&entry.encode()).unwrap(), &entry);
                let (before, attempt) = (state.clone(), attempt(deed.1));
                let applied = state.apply(&entry).is_ok();
                let stale = before.joint(&attempt).is_some_and(|(.., joint)| joint.expected != before.version(&attempt.name));
                match deed.0 {
                    0 if before.completed(&attempt).is_some() || before.joint(&attempt).is_some() => prop_assert!(!applied),
                    0 => prop_assert_eq!(applied, !before.sessions.contains_key(&entry.session.unwrap())),
                    1 if stale => prop_assert!(!applied, "an attempt that began before the name moved"),
                    1 if before.joint(&attempt).is_some() => {
                        prop_assert!(applied && state.completed(&attempt).is_some() && state.joint(&attempt).is_none());
                    }
                    _ => prop_assert!(applied),
                }
                let mut open: Vec<String> =
                    state.sessions.values().map(|session| format!("{:?}", session.joint.as_ref().map(|j| &j.attempt))).collect();
                open.sort();
                prop_assert!(open.windows(2).all(|pair| pair[0] != pair[1]), "one session for an attempt");
                prop_assert_eq!(&State::decode(1, &state.encode()).unwrap(), &state);
            }
        }
    }

    #[test]
    fn an_attempt_is_named_by_one_segment() {
        for good in ["0", "4711.2", "a_b-c+d=e"] {
            assert_eq!(good.parse::<AttemptId>().unwrap().as_str(), good);
        }
        for bad in ["", ".", "a/b", "a b", "\u{e9}", &"a".repeat(ATTEMPT_LEN_MAX + 1)] {
            assert!(bad.parse::<AttemptId>().is_err(), "{bad}");
        }
    }
}
