//! Commits of actors: the rules that the repository's verbs follow, on the log's real `State`.

use towline::clock::Timestamp;
use towline::id::SessionId;
use towline::repository::AttemptState;
use towline::repository::layout::Family;
use towline::repository::log::{Action, KeptValue, LogEntry, RefValue, State, StepFacts};

use super::actor::{Act, Actor};
use super::book::{JOINT, Set, attempt, joint_in, members, name, session};
use super::model::{Model, Mutation, World, info};

impl Model {
    /// The entry that an actor commits on `state`; `None` if it gives up.
    pub(crate) fn entry(&mut self, actor: &Actor, who: u8, act: Act, state: u32) -> Option<LogEntry> {
        let own = Some(session(who));
        let known = self.book.state(actor.known);
        let now = self.book.state(state);
        let (session, actions) = match act {
            Act::Open => (own, vec![Action::Open(session(who))]),
            Act::Renew => (own, vec![Action::Renew(session(who))]),
            Act::Close => (own, vec![Action::Close(session(who))]),
            Act::AddSegment => {
                let segment = self.own_segment(who);
                (own, vec![Action::AddSegment(self.book.id(segment), info(self.book.packs(segment)))])
            }
            Act::Save(to) => (own.filter(|_| !self.broken(Mutation::SaveUnbound)), self.save(actor, who, to, state)?),
            Act::Copy(from, to) => (None, self.copy(actor, from, to, state)?),
            Act::Remove(which) => {
                let which = name(which);
                let remove = known.version(&which).map(|expected| Action::RemoveRef { name: which, expected });
                (None, remove.into_iter().collect())
            }
            Act::RemoveKept(_) | Act::Undelete(_) | Act::Forget(_) => (None, self.kept_values(actor, act, state)?),
            Act::Condemn => (None, self.condemn(actor, state)),
            Act::CondemnDamaged(whose) => {
                let pack = self.own_pack(whose);
                let pack = self.book.id(pack);
                // An actor that finds damage has seen the pack: its session was open by then.
                let seen = self.book.state(actor.known).sessions.contains_key(&pack.session);
                let found = seen && self.book.state(state).is_target(&pack);
                (None, found.then_some(Action::Condemn { pack, len: 1, damaged: true }).into_iter().collect())
            }
            Act::Judge => (None, self.judge(actor, state)),
            Act::Deleted => {
                let gone = known.purged.iter().filter(|(_, purged)| !purged.deleted).map(|(pack, _)| *pack);
                let gone: Vec<_> = gone.filter(|pack| now.purged.get(pack).is_some_and(|p| !p.deleted)).collect();
                (None, if gone.is_empty() { vec![] } else { vec![Action::Deleted(gone)] })
            }
            Act::Replace => self.replace(actor, who, state),
            Act::Repack(which) => (own, self.repack(actor, who, which, state)?),
            Act::Join => match now.attempt_state(&attempt()) {
                AttemptState::Absent => {
                    let joint = session(JOINT + who);
                    (Some(joint), vec![Action::OpenJoint(joint, attempt())])
                }
                _ => (None, vec![]),
            },
            Act::AddRank(rank) => {
                let joint = joint_in(known).map(session);
                let segment = self.rank_segment(actor.known, rank);
                let segment_info = info(self.book.packs(segment));
                // A segment that another process of this rank has added is found, and need not be stored again.
                let known_already = self.book.state(state).segments.contains_key(&self.book.id(segment));
                let add = Action::AddSegment(self.book.id(segment), segment_info);
                (joint, (!known_already).then_some(add).into_iter().collect())
            }
            Act::Complete => self.complete(actor, who, state)?,
            Act::FenceJoint => {
                let judged = if self.broken(Mutation::FenceAnyTouched) { now } else { known };
                let stalled = judged.joint(&attempt()).map(|(session, open, _)| (session, open.touched));
                (None, stalled.map(|(session, touched)| Action::Fence { session, touched }).into_iter().collect())
            }
            Act::Fence(whose) => {
                let judged = if self.broken(Mutation::FenceAnyTouched) { now } else { known };
                let stalled = judged.sessions.get(&session(whose)).map(|found| found.touched);
                let fence = |touched| Action::Fence { session: session(whose), touched };
                (None, stalled.map(fence).into_iter().collect())
            }
        };
        Some(LogEntry { write: Self::write_of(actor, who), session, at: Timestamp(0), actions })
    }

    /// The pardons that it takes to rely on `packs`.
    fn check_packs(&mut self, actor: &Actor, packs: Set, state: u32) -> Option<Vec<Action>> {
        let aged = if self.broken(Mutation::AgelessKnowledge) { u64::MAX } else { self.book.state(actor.known).seq };
        match self.book.state(state).check_packs(&self.book.ids(packs), aged) {
            Ok(_) if self.broken(Mutation::NoPardon) => Some(vec![]),
            Ok(pardons) => {
                if !pardons.is_empty() {
                    self.meet("condemned pack relied on");
                }
                Some(pardons)
            }
            Err(_) if self.broken(Mutation::NoVouch) => Some(vec![]),
            Err(_) => {
                self.meet("lost pack not relied on");
                None
            }
        }
    }

    fn save(&mut self, actor: &Actor, who: u8, to: &str, state: u32) -> Option<Vec<Action>> {
        // Of its own packs a writer asks nothing.
        let foreign = self.book.packs(actor.made) & !(1 << self.own_pack(who));
        let mut actions = self.check_packs(actor, foreign, state)?;
        let (name, value) = (name(to), self.book.value(actor.made));
        let expected = self.book.state(actor.known).version(&name);
        actions.push(Action::SetRef { name, expected, value });
        actions.extend((!self.broken(Mutation::SaveUnbound)).then_some(Action::Close(session(who))));
        Some(actions)
    }

    /// As the last of the ranks: the session decides whether there is anything left to do.
    fn complete(&mut self, actor: &Actor, who: u8, state: u32) -> Option<(Option<SessionId>, Vec<Action>)> {
        let (joint, _, opened) = self.book.state(actor.known).joint(&attempt())?;
        let (expected, unbound) = (opened.expected, self.broken(Mutation::SaveUnbound));
        if !unbound && !self.book.state(state).sessions.contains_key(&joint) {
            let complete = self.book.state(state).completed(&attempt()).is_some();
            self.meet(if complete { "another rank was faster" } else { "attempt was ended" });
            return Some((None, vec![]));
        }
        let mut actions = self.check_packs(actor, self.book.packs(actor.made), state)?;
        let facts = StepFacts::default().world_size(attempt().ranks);
        // Nobody else's value has these keys, nor this time.
        let saved = Timestamp(who.into());
        let value = RefValue { facts, saved, attempt: Some(attempt().id), ..self.book.value(actor.made) };
        actions.push(Action::SetRef { name: attempt().name, expected, value });
        actions.extend((!unbound).then_some(Action::Close(joint)));
        Some(((!unbound).then_some(joint), actions))
    }

    /// As `towline cp`: the source is what it is in the very state that the commit follows, so it keeps its packs.
    fn copy(&mut self, actor: &Actor, from: &str, to: &str, state: u32) -> Option<Vec<Action>> {
        let (from, to) = (name(from), name(to));
        let now = self.book.state(state);
        let source = if self.broken(Mutation::CopyBlindly) { self.book.state(actor.known) } else { now };
        let value = source.refs.get(&from).map(|value| RefValue { version: 0, ..value.clone() });
        let expected = now.version(&to);
        if value.is_none() {
            self.meet("copy's source gone");
        }
        Some(vec![Action::SetRef { name: to, expected, value: value? }])
    }

    /// Actions about what is kept of removed names.
    fn kept_values(&mut self, actor: &Actor, act: Act, state: u32) -> Option<Vec<Action>> {
        let (known, now) = (self.book.state(actor.known), self.book.state(state));
        match act {
            Act::RemoveKept(which) => {
                let which = name(which);
                let remove = |version| {
                    let keep = Action::Keep { name: which.clone(), version };
                    vec![keep, Action::RemoveRef { name: which.clone(), expected: version }]
                };
                Some(known.version(&which).map(remove).unwrap_or_default())
            }
            Act::Forget(which) => {
                let kept = known.removed.iter().filter(|((of, _), _)| *of == name(which));
                let still = kept.filter(|(key, removed)| now.removed.get(key).is_some_and(|now| now.at == removed.at));
                Some(still.map(|(key, removed)| removed.forget(key)).collect())
            }
            Act::Undelete(which) => self.undelete(actor, which, state),
            _ => None,
        }
    }

    /// As `towline undelete`: what is kept is what it was when its map was read, and its packs are checked.
    fn undelete(&mut self, actor: &Actor, which: &str, state: u32) -> Option<Vec<Action>> {
        let kept = |(version, removed): (u64, &KeptValue)| ((name(which), version), removed.clone());
        let (key, removed) = self.book.state(actor.known).removed_of(&name(which)).next_back().map(kept)?;
        let blindly = self.broken(Mutation::UndeleteBlindly);
        let still = self.book.state(state).removed.get(&key).is_some_and(|now| *now == removed);
        if !still && !blindly {
            self.meet("nothing to undelete");
            return None;
        }
        let packs = self.book.packs(self.book.find(Family::Map, removed.value.map_key));
        let mut actions = if blindly { vec![] } else { self.check_packs(actor, packs, state)? };
        let (expected, value) =
            (self.book.state(state).version(&key.0), RefValue { version: 0, ..removed.value.clone() });
        actions.push(Action::SetRef { name: key.0.clone(), expected, value });
        actions.extend(still.then(|| removed.forget(&key)));
        self.meet("undeleted");
        Some(actions)
    }

    /// Packs that a marking finds used.
    fn marked(&self, state: u32) -> Set {
        if self.broken(Mutation::MarkNamesAlone) { self.book.named(state) } else { self.book.known(state).marked }
    }

    /// Packs that were listed and unmarked when looked at, and still may be condemned.
    fn condemn(&self, actor: &Actor, state: u32) -> Vec<Action> {
        let (known, now) = (self.book.known(actor.known), self.book.state(state));
        let packs = members(known.listed & !self.marked(actor.known)).map(|number| self.book.id(number));
        let open = |state: &State, id| state.sessions.contains_key(&id);
        let packs = packs.filter(|pack| !open(&known.state, pack.session) && !open(now, pack.session));
        let packs = packs.filter(|pack| known.state.is_target(pack) && now.is_target(pack));
        packs.map(|pack| Action::Condemn { pack, len: 1, damaged: false }).collect()
    }

    /// Pardons packs that were condemned and marked again when looked at; the rest is purged.
    fn judge(&self, actor: &Actor, state: u32) -> Vec<Action> {
        let now = self.book.state(state);
        if self.broken(Mutation::NoRemark) {
            return now.condemned.iter().map(|(&pack, c)| Action::Purge { pack, at: c.at }).collect();
        }
        let known = self.book.known(actor.known);
        let verdict = |(&pack, condemned): (&_, &towline::repository::log::Condemned)| {
            let marked = self.marked(actor.known) & self.book.pack_set([&pack]) != 0;
            let at = match now.condemned.get(&pack) {
                Some(newer) if self.broken(Mutation::PurgeAnyAt) => newer.at,
                _ => condemned.at,
            };
            match (marked, condemned.damaged) {
                (false, _) => Some(Action::Purge { pack, at }),
                (true, false) => Some(Action::Pardon { pack, at }),
                (true, true) => None,
            }
        };
        known.state.condemned.iter().filter_map(verdict).collect()
    }

    /// As the repacker: nothing is vouched for, since what the old map names is marked as long as any ref has it.
    fn repack(&mut self, actor: &Actor, who: u8, which: &str, state: u32) -> Option<Vec<Action>> {
        let segment = self.own_segment(who);
        let old = self.book.state(actor.known).refs.get(&name(which))?.map_key;
        if !self.book.state(state).refs.values().any(|value| value.map_key == old) {
            self.meet("nothing to swap");
        }
        let now = self.book.state(state);
        let moved = self.book.ids(self.book.packs(self.book.find(Family::Map, old)));
        let condemned = moved.into_iter().filter(|pack| now.is_target(pack));
        let mut actions = vec![
            Action::AddSegment(self.book.id(segment), info(self.book.packs(segment))),
            Action::SwapMap { old, new: self.book.id(actor.made) },
        ];
        actions.extend(condemned.map(|pack| Action::Condemn { pack, len: 1, damaged: false }));
        actions.push(Action::Close(session(who)));
        Some(actions)
    }

    /// Known segments that list purged packs give way to the merged one, and the session that wrote it closes.
    fn replace(&self, actor: &Actor, who: u8, state: u32) -> (Option<SessionId>, Vec<Action>) {
        let (old, packs) = self.merged(actor.known);
        let newest = self.broken(Mutation::ReplaceBuiltNow);
        let built = self.book.state(if newest { state } else { actor.known }).seq;
        let old: Vec<_> = members(old).map(|number| self.book.id(number)).collect();
        let new = if packs == 0 { vec![] } else { vec![(self.book.id(actor.made), info(packs))] };
        if old.is_empty() {
            return (None, vec![]);
        }
        let mut actions = vec![Action::ReplaceSegments { old, new, built }];
        let open = self.book.state(actor.known).sessions.contains_key(&session(who));
        actions.extend(open.then_some(Action::Close(session(who))));
        (open.then_some(session(who)), actions)
    }

    /// Claims of an actor by an entry that takes effect as it is sent.
    pub(crate) fn made(&mut self, world: &World, actor: &Actor, this: &LogEntry, number: u8) -> Result<(), String> {
        let before = self.book.state(self.book.state_at(world.history, number - 1));
        for action in &this.actions {
            if let Action::Fence { session, .. } = action {
                let known = self.book.state(actor.known);
                if before.sessions.get(session) != known.sessions.get(session) {
                    return Err("a session is fenced that is alive".to_owned());
                }
                self.meet("session fenced");
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Does `state` show that entry `number` was `entry`? As in commit.rs: each ref that it sets must still be as set.
pub(crate) fn shows(state: &State, entry: &LogEntry, number: u8, by_version: bool) -> bool {
    let mut sets = entry.actions.iter().filter_map(|action| match action {
        Action::SetRef { name, value, .. } => Some((name, RefValue { version: number.into(), ..value.clone() })),
        _ => None,
    });
    if by_version {
        return sets.any(|(name, value)| state.version(name) == Some(value.version));
    }
    let first = sets.next();
    first.is_some() && first.into_iter().chain(sets).all(|(name, value)| state.refs.get(name) == Some(&value))
}
