//! Everything that an exploration has met: objects, states, entries and histories, each once, so that a world is a few numbers.

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU32;

use towline::clock::Timestamp;
use towline::id::{ManifestId, ObjectId, Owned, SessionId, WriteId};
use towline::name::Name;
use towline::repository::layout::Family;
use towline::repository::log::{Action, Attempt, AttemptId, LogEntry, RefValue, State, StepFacts};

use super::model::Mutation;

/// A set of objects, by their numbers in the book.
pub(crate) type Set = u128;

/// Session `n`: actors have 0 to 9, the past has 90 and more.
pub(crate) fn session(n: u8) -> SessionId {
    SessionId::from_bytes([n; 16])
}

/// The joint session that actor `n` opens is number `JOINT + n`.
pub(crate) const JOINT: u8 = 50;

/// The one attempt: two ranks save `step`.
pub(crate) fn attempt() -> Attempt {
    Attempt { name: name("step"), id: AttemptId::default(), ranks: NonZeroU32::new(2).unwrap() }
}

/// The number of the joint session in `state`.
pub(crate) fn joint_in(state: &State) -> Option<u8> {
    state.joint(&attempt()).map(|(id, ..)| id.to_bytes()[0])
}

/// Which session wrote an object.
pub(crate) fn owner(id: Owned) -> u8 {
    id.session.to_bytes()[0]
}

/// The write id of actor `who` at step `step` of its script.
pub(crate) fn write_id(who: u8, step: u8) -> WriteId {
    let mut bytes = [0; 16];
    (bytes[0], bytes[1]) = (who, step);
    WriteId::from_bytes(bytes)
}

pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// The numbers in a set.
pub(crate) fn members(mut set: Set) -> impl Iterator<Item = u8> {
    std::iter::from_fn(move || {
        let first = set.trailing_zeros();
        (set != 0).then(|| {
            set &= set - 1;
            u8::try_from(first).unwrap()
        })
    })
}

/// A pack, a map or an index segment. Its content never changes; maps and segments list packs.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    id: Owned,
    packs: Set,
}

/// Facts that follow from a state.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) state: State,
    /// Maps that refs and kept values name and the packs in them, and live segments: what must exist.
    pub(crate) needs: Set,
    /// Packs in maps that refs and kept values name.
    pub(crate) marked: Set,
    /// Packs that live segments list.
    pub(crate) listed: Set,
}

/// One true history of the log: its last entry and the history before it.
#[derive(Clone, Debug)]
pub(crate) struct History {
    before: u32,
    entry: u32,
    pub(crate) state: u32,
    pub(crate) len: u8,
    /// Steps whose writes are committed, by actor.
    pub(crate) writes: [u32; 8],
    /// Packs ever purged.
    purged: Set,
    /// Ranks have made their step visible.
    complete: bool,
}

/// The book. Number 0 is the empty state, no entry, and the empty history.
#[derive(Debug)]
pub(crate) struct Book {
    objects: Vec<Object>,
    by_id: HashMap<(Family, Owned), u8>,
    states: Vec<Known>,
    by_state: HashMap<State, u32>,
    entries: Vec<LogEntry>,
    by_entry: HashMap<Vec<u8>, u32>,
    after: HashMap<(u32, u32), Option<u32>>,
    histories: Vec<History>,
    by_history: HashMap<(u32, u32), u32>,
    pub(crate) mutation: Option<Mutation>,
}

impl Book {
    pub(crate) fn new() -> Self {
        let empty = Known { state: State::default(), needs: 0, marked: 0, listed: 0 };
        let none = LogEntry { write: write_id(255, 255), session: None, at: Timestamp(0), actions: vec![] };
        Self {
            objects: vec![],
            by_id: HashMap::new(),
            by_state: HashMap::from([(State::default(), 0)]),
            states: vec![empty],
            entries: vec![none],
            by_entry: HashMap::new(),
            after: HashMap::new(),
            histories: vec![History {
                before: 0,
                entry: 0,
                state: 0,
                len: 0,
                writes: [0; 8],
                purged: 0,
                complete: false,
            }],
            by_history: HashMap::new(),
            mutation: None,
        }
    }

    /// The number of session `by`'s object that holds `packs`: the same content has the same name.
    pub(crate) fn object(&mut self, family: Family, by: u8, packs: Set) -> u8 {
        let content = *blake3::hash(&packs.to_le_bytes()).as_bytes();
        let object = ObjectId::from_bytes(content[..16].try_into().unwrap());
        let id = Owned { session: session(by), object };
        let next = u8::try_from(self.objects.len()).unwrap();
        let number = *self.by_id.entry((family, id)).or_insert(next);
        if number == next {
            assert!(next < 128, "too many objects for one exploration");
            self.objects.push(Object { id, packs });
        }
        number
    }

    pub(crate) fn id(&self, number: u8) -> Owned {
        self.objects[usize::from(number)].id
    }

    pub(crate) fn packs(&self, number: u8) -> Set {
        self.objects[usize::from(number)].packs
    }

    pub(crate) fn ids(&self, set: Set) -> BTreeSet<Owned> {
        members(set).map(|number| self.id(number)).collect()
    }

    /// The object that `id` names.
    pub(crate) fn find(&self, family: Family, id: Owned) -> u8 {
        self.by_id[&(family, id)]
    }

    pub(crate) fn pack_set<'a>(&self, ids: impl IntoIterator<Item = &'a Owned>) -> Set {
        ids.into_iter().fold(0, |set, id| set | 1 << self.find(Family::Pack, *id))
    }

    /// A value whose map is object `map`; the manifest is not modelled.
    pub(crate) fn value(&self, map: u8) -> RefValue {
        RefValue {
            version: 0,
            manifest: ManifestId::from_bytes([map; 32]),
            manifest_key: self.id(map),
            map_key: self.id(map),
            saved: Timestamp(0),
            logical_bytes: 1,
            files: 1,
            chunks: 1,
            behind: 0,
            facts: StepFacts::default(),
            attempt: None,
        }
    }

    /// Packs in maps that refs alone name.
    pub(crate) fn named(&self, state: u32) -> Set {
        let maps = self.state(state).refs.values().map(|value| self.find(Family::Map, value.map_key));
        maps.fold(0, |packs, map| packs | self.packs(map))
    }

    pub(crate) fn known(&self, state: u32) -> &Known {
        &self.states[state as usize]
    }

    pub(crate) fn state(&self, state: u32) -> &State {
        &self.states[state as usize].state
    }

    pub(crate) fn entry(&self, entry: u32) -> &LogEntry {
        &self.entries[entry as usize]
    }

    pub(crate) fn history(&self, history: u32) -> &History {
        &self.histories[history as usize]
    }

    /// Files an entry; it must survive its encoding.
    pub(crate) fn file_entry(&mut self, entry: LogEntry) -> u32 {
        let body = entry.encode();
        if let Some(&number) = self.by_entry.get(&body) {
            return number;
        }
        assert_eq!(LogEntry::decode(&body).unwrap(), entry, "an entry changes by being encoded");
        let number = u32::try_from(self.entries.len()).unwrap();
        self.entries.push(entry);
        self.by_entry.insert(body, number);
        number
    }

    fn file_state(&mut self, state: State) -> u32 {
        if let Some(&number) = self.by_state.get(&state) {
            return number;
        }
        assert_eq!(
            State::decode(state.snapshot_version(), &state.encode()).unwrap(),
            state,
            "a state changes by being encoded"
        );
        let maps = state.roots().fold(0, |set: Set, (_, value)| set | 1 << self.find(Family::Map, value.map_key));
        let segments = state.segments.keys().fold(0, |set: Set, id| set | 1 << self.find(Family::Index, *id));
        let inside = |set: Set| members(set).fold(0, |packs, number| packs | self.packs(number));
        let (marked, listed) = (inside(maps), inside(segments));
        let number = u32::try_from(self.states.len()).unwrap();
        self.by_state.insert(state.clone(), number);
        self.states.push(Known { state, needs: maps | segments | marked, marked, listed });
        number
    }

    /// The state after `entry`; `None` if it may not follow.
    pub(crate) fn apply(&mut self, state: u32, entry: u32) -> Option<u32> {
        if let Some(&after) = self.after.get(&(state, entry)) {
            return after;
        }
        let mut next = self.state(state).clone();
        let allowed = next.check(self.entry(entry)).is_ok();
        let applied = next.apply(self.entry(entry)).is_ok();
        assert_eq!(allowed, applied, "check and apply disagree");
        match self.mutation {
            Some(Mutation::ForgetEarly) => next.purged.retain(|_, purged| !purged.deleted),
            Some(Mutation::AddBuiltNow) => {
                let added = |id: &Owned| {
                    self.entry(entry).actions.iter().any(|a| matches!(a, Action::AddSegment(n, _) if n == id))
                };
                let seq = next.seq;
                next.segments.iter_mut().filter(|(id, _)| added(id)).for_each(|(_, segment)| segment.built = seq);
            }
            _ => {}
        }
        let after = applied.then(|| self.file_state(next));
        self.after.insert((state, entry), after);
        after
    }

    /// The history one entry longer.
    pub(crate) fn append(&mut self, history: u32, entry: u32) -> Result<u32, String> {
        if let Some(&next) = self.by_history.get(&(history, entry)) {
            return Ok(next);
        }
        let mut next = self.history(history).clone();
        let state = self.apply(next.state, entry).ok_or("an entry is committed that may not follow")?;
        let write = self.entry(entry).write.to_bytes();
        if let Some(writes) = next.writes.get_mut(usize::from(write[0])) {
            if *writes & 1 << write[1] != 0 {
                return Err(format!("a write is committed twice: {:?}", self.entry(entry)));
            }
            *writes |= 1 << write[1];
        }
        let joint = |action: &Action| matches!(action, Action::SetRef { value, .. } if value.attempt.is_some());
        if self.entry(entry).actions.iter().any(joint) {
            if next.complete {
                return Err("an attempt is complete twice".to_owned());
            }
            next.complete = true;
        }
        for action in &self.entry(entry).actions {
            next.purged |= match action {
                Action::Purge { pack, .. } => 1 << self.find(Family::Pack, *pack),
                _ => 0,
            };
        }
        self.remembers(state, next.purged)?;
        next = History { before: history, entry, state, len: next.len + 1, ..next };
        let number = u32::try_from(self.histories.len()).unwrap();
        self.histories.push(next);
        self.by_history.insert((history, entry), number);
        Ok(number)
    }

    /// Nothing relies on what was ever purged, and what a live segment still lists of it is remembered.
    fn remembers(&self, state: u32, purged: Set) -> Result<(), String> {
        let known = self.known(state);
        if known.marked & purged != 0 {
            return Err("a ref relies on a purged pack".to_owned());
        }
        let remembered = self.pack_set(known.state.purged.keys());
        if known.listed & purged & !remembered != 0 {
            return Err("a live segment lists a purged pack, and the purge is forgotten".to_owned());
        }
        Ok(())
    }

    /// Entry `number` of a history.
    pub(crate) fn entry_at(&self, history: u32, number: u8) -> u32 {
        self.at(history, number).entry
    }

    /// The state after entry `number` of a history.
    pub(crate) fn state_at(&self, history: u32, number: u8) -> u32 {
        self.at(history, number).state
    }

    fn at(&self, history: u32, number: u8) -> &History {
        let mut found = self.history(history);
        while found.len > number {
            found = self.history(found.before);
        }
        found
    }
}
