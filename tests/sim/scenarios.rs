//! Small worlds, explored whole: none violates a rule, and each rule that is left out is missed somewhere.

use std::time::Instant;

use super::actor::Act::{
    AddRank, AddSegment, Close, Complete, Condemn, CondemnDamaged, Copy, Deleted, Fence, FenceJoint, Forget, Join,
    Judge, Open, Remove, RemoveKept, Renew, Repack, Replace, Save, Undelete,
};
use super::actor::Step::{
    self, Bound, Choose, Commit, Cut, DeletePurged, Gather, List, ListCut, Look, PutMap, PutMerged, PutMoved, PutPack,
    PutPart, PutRankPack, PutRankSegment, PutSegment, PutUnion, Raise, Snapshot, Sweep,
};
use super::explore::{Report, explore};
use super::model::{Model, Mutation, World};

/// Actors, their past, and the number of faults.
struct Scenario {
    scripts: Vec<Vec<Step>>,
    past: fn(&mut Model, &mut World),
    faults: u8,
}

impl Scenario {
    fn run(self, mutation: Option<Mutation>) -> Report {
        let began = Instant::now();
        let mut model = Model::new(self.scripts, mutation);
        let mut world = model.start(self.faults);
        (self.past)(&mut model, &mut world);
        let report = explore(&mut model, &world);
        println!("{mutation:?}: {report} in {:.1} s", began.elapsed().as_secs_f64());
        report
    }

    /// Nothing is violated, and each of `hazards` was met.
    fn holds(self, hazards: &[&str]) {
        let report = self.run(None);
        assert!(report.violation.is_none(), "{report}");
        for hazard in hazards {
            assert!(report.met.contains_key(hazard), "never met: {hazard}");
        }
    }

    /// Without the rule, something is violated.
    fn misses(self, mutation: Mutation) {
        let report = self.run(Some(mutation));
        assert!(report.violation.is_some(), "nothing notices that a rule is left out: {mutation:?}");
    }
}

fn save(to: &'static str) -> Vec<Step> {
    vec![Look, Commit(Open), PutPack, PutSegment, Commit(AddSegment), PutMap, Commit(Save(to))]
}

/// Packs become known, and no ref needs them.
fn adds_only() -> Vec<Step> {
    vec![Commit(Open), PutPack, PutSegment, Commit(AddSegment), Commit(Close)]
}

/// A save that makes its packs known by its ref alone: fewer worlds.
fn quick_save(to: &'static str) -> Vec<Step> {
    vec![Look, Commit(Open), PutPack, PutMap, Commit(Save(to))]
}

const COLLECT: [Step; 7] = [Look, Commit(Condemn), Look, Commit(Judge), Look, DeletePurged, Commit(Deleted)];
const TRUNCATE: [Step; 7] = [Look, Bound, Snapshot, Choose, Raise, ListCut, Cut];

fn collect(rest: &[Step]) -> Vec<Step> {
    [&COLLECT[..], rest].concat()
}

/// One pack is known and needed by nobody; then actors start with a warm cache.
fn garbage(model: &mut Model, world: &mut World) {
    model.past_save(world, 90, "old", 1);
    model.past_remove(world, "old");
    model.warm(world);
}

/// One pack is known and needed; nobody has read the log yet.
fn saved(model: &mut Model, world: &mut World) {
    model.past_save(world, 90, "old", 1);
}

/// Two saves of one pack each.
fn saved_twice(model: &mut Model, world: &mut World) {
    model.past_save(world, 90, "x", 1);
    model.past_save(world, 91, "y", 1);
    Model::past_truncate(world);
    model.warm(world);
}

/// The same, and the first actor has a session.
fn saved_twice_and_session(model: &mut Model, world: &mut World) {
    model.past_save(world, 90, "x", 1);
    model.past_save(world, 91, "y", 1);
    model.past_open(world, 0);
    Model::past_truncate(world);
    model.warm(world);
}

/// Two packs are known, in one segment, and needed by nobody.
fn garbage_of_two(model: &mut Model, world: &mut World) {
    model.past_save(world, 90, "old", 2);
    model.past_remove(world, "old");
    model.warm(world);
}

/// The same, with one of the two purged.
fn half_purged(model: &mut Model, world: &mut World) {
    garbage_of_two(model, world);
    model.past_purge(world);
    model.warm(world);
}

/// Garbage, and the first two actors have sessions.
fn garbage_and_sessions(model: &mut Model, world: &mut World) {
    garbage(model, world);
    model.past_open(world, 0);
    model.past_open(world, 1);
    model.warm(world);
}

/// Nothing was ever saved.
fn nothing(_: &mut Model, _: &mut World) {}

fn scenario(scripts: Vec<Vec<Step>>, past: fn(&mut Model, &mut World), faults: u8) -> Scenario {
    Scenario { scripts, past, faults }
}

fn look_and(act: super::actor::Act) -> Vec<Step> {
    vec![Look, Commit(act)]
}

/// Rank `rank` of two, from the beginning.
fn rank(rank: u8) -> Vec<Step> {
    [vec![Commit(Join)], joined_rank(rank)].concat()
}

/// The same, whoever opened the session.
fn joined_rank(rank: u8) -> Vec<Step> {
    let part = [Look, PutRankPack(rank), PutRankSegment(rank), Commit(AddRank(rank)), PutPart(rank)];
    [&part[..], &[Gather(2), PutUnion, Commit(Complete)]].concat()
}

/// Garbage that ranks may reuse, and their session.
fn garbage_and_joint(model: &mut Model, world: &mut World) {
    garbage(model, world);
    model.past_join(world, 0);
    model.warm(world);
}

/// Two saves, and the ranks' session, after a truncation.
fn saved_and_joint(model: &mut Model, world: &mut World) {
    model.past_save(world, 90, "x", 1);
    model.past_join(world, 0);
    Model::past_truncate(world);
    model.warm(world);
}

// Ranks that save a step together.

fn ranks_and_a_collector() -> Scenario {
    scenario(vec![joined_rank(0), joined_rank(1), collect(&[])], garbage_and_joint, 1)
}

fn ranks_that_come_twice() -> Scenario {
    scenario(vec![rank(0), rank(1), rank(1)], nothing, 1)
}

fn ranks_fenced_and_swept() -> Scenario {
    scenario(
        vec![joined_rank(0), joined_rank(1), vec![Look, Commit(FenceJoint), List, Look, Sweep]],
        garbage_and_joint,
        1,
    )
}

fn ranks_begin_again() -> Scenario {
    scenario(vec![rank(0), rank(1), rank(0), vec![Look, Commit(FenceJoint)]], nothing, 0)
}

fn ranks_under_truncation() -> Scenario {
    scenario(vec![joined_rank(0), joined_rank(1), TRUNCATE.to_vec()], saved_and_joint, 0)
}

#[test]
fn two_ranks_and_a_collector() {
    let met = ["rank not the last", "another rank was faster", "condemned pack relied on", "lost pack not relied on"];
    ranks_and_a_collector().holds(&met);
}

#[test]
fn two_ranks_one_of_which_comes_twice() {
    ranks_that_come_twice().holds(&["part there already", "another rank was faster", "race lost"]);
}

#[test]
fn ranks_whose_attempt_is_ended() {
    ranks_fenced_and_swept().holds(&["session fenced", "attempt was ended", "object deleted"]);
    ranks_begin_again().holds(&["session fenced", "attempt was ended"]);
}

#[test]
fn two_ranks_and_a_truncation() {
    ranks_under_truncation().holds(&["race lost", "stray entry under a name that was cut away"]);
}

#[test]
fn rules_about_ranks_are_needed() {
    ranks_and_a_collector().misses(Mutation::NoVouch);
    ranks_and_a_collector().misses(Mutation::NoPardon);
    ranks_fenced_and_swept().misses(Mutation::SaveUnbound);
    ranks_fenced_and_swept().misses(Mutation::FenceAnyTouched);
}

// Packs: no truncation.

fn reuse_against_two_collectors() -> Scenario {
    scenario(vec![quick_save("a"), collect(&[]), collect(&[])], garbage, 1)
}

fn two_writers_two_collectors() -> Scenario {
    let writer = |to| vec![Look, PutPack, PutMap, Commit(Save(to))];
    let purge = vec![Look, Commit(Condemn), Look, Commit(Judge)];
    scenario(vec![writer("a"), writer("b"), collect(&[]), purge], garbage_and_sessions, 1)
}

fn memory_of_purges() -> Scenario {
    let replace = [Look, Commit(Open), PutMerged, Commit(Replace)];
    scenario(vec![quick_save("a"), collect(&replace)], garbage_of_two, 2)
}

fn replaced_behind_the_back() -> Scenario {
    let replace = vec![Look, Commit(Open), PutMerged, Commit(Replace)];
    scenario(vec![quick_save("a"), collect(&[]), replace], half_purged, 0)
}

fn fenced_and_swept() -> Scenario {
    let mut alive = save("a");
    alive.insert(5, Commit(Renew));
    let fence = vec![Look, Commit(Fence(0)), List, Look, Sweep];
    scenario(vec![alive, fence, vec![List, Look, Sweep]], garbage, 1)
}

fn copied_and_removed() -> Scenario {
    let sweep = collect(&[List, Look, Sweep]);
    scenario(vec![look_and(Copy("old", "new")), look_and(Remove("old")), sweep, collect(&[])], saved, 1)
}

fn repacked_and_reused() -> Scenario {
    let moves = [Look, Commit(Open), PutPack, PutSegment, PutMoved, Commit(Repack("old")), Look, Commit(Judge)];
    let repack = [&moves[..], &[Look, DeletePurged, Commit(Deleted)]].concat();
    let writer = vec![Look, Commit(Open), PutPack, PutMap, Commit(Save("a"))];
    scenario(vec![repack, writer, vec![Commit(Copy("old", "new"))], collect(&[])], saved, 0)
}

fn repacked_and_swept() -> Scenario {
    let repack = vec![Look, Commit(Open), PutPack, PutSegment, PutMoved, Commit(Repack("old"))];
    let others = [look_and(Copy("old", "new")), look_and(Remove("old")), collect(&[List, Look, Sweep])];
    scenario([vec![repack], others.to_vec()].concat(), saved, 0)
}

/// A collect that forgets what is kept of a name first.
fn forget_and_collect(which: &'static str) -> Vec<Step> {
    [&[Look, Commit(Forget(which))][..], &collect(&[List, Look, Sweep])].concat()
}

fn removed_and_undeleted() -> Scenario {
    let takers = [look_and(RemoveKept("old")), look_and(Undelete("old"))];
    scenario([takers.to_vec(), vec![forget_and_collect("old"), collect(&[])]].concat(), saved, 1)
}

/// What is kept is restored by two at once.
fn undeleted_twice() -> Scenario {
    let takers = [look_and(Undelete("old")), look_and(Undelete("old")), look_and(Remove("new"))];
    scenario([takers.to_vec(), vec![forget_and_collect("old")]].concat(), copied_and_kept, 1)
}

fn undeleted_while_repacked() -> Scenario {
    let repack = vec![Look, Commit(Open), PutPack, PutSegment, PutMoved, Commit(Repack("new"))];
    scenario(vec![repack, look_and(Undelete("old")), collect(&[List, Look, Sweep])], copied_and_kept, 0)
}

/// One pack; the name that it was saved under is removed and kept, another one stands for it.
fn copied_and_kept(model: &mut Model, world: &mut World) {
    model.past_save(world, 90, "old", 1);
    model.past_copy_and_keep(world, "old", "new");
}

/// Damage is condemned and purged in a session that goes on.
fn damaged_in_an_open_session(writer: Vec<Step>) -> Scenario {
    let purge = vec![Look, Commit(CondemnDamaged(0)), Look, Commit(Judge), Look, DeletePurged, Commit(Deleted)];
    scenario(vec![writer, purge, quick_save("b")], nothing, 1)
}

#[test]
fn a_writer_and_two_collectors() {
    reuse_against_two_collectors().holds(&["condemned pack relied on", "lost pack not relied on", "object deleted"]);
}

#[test]
fn two_writers_and_two_collectors() {
    two_writers_two_collectors().holds(&["condemned pack relied on", "lost pack not relied on", "object deleted"]);
}

#[test]
fn purges_are_remembered_while_it_matters() {
    memory_of_purges().holds(&["lost pack not relied on"]);
    replaced_behind_the_back().holds(&["lost pack not relied on"]);
}

#[test]
fn a_fenced_session_is_swept() {
    fenced_and_swept().holds(&["session fenced", "commit refused", "object deleted"]);
}

#[test]
fn copies_and_removals() {
    copied_and_removed().holds(&["copy's source gone", "object deleted"]);
}

#[test]
fn repacking() {
    repacked_and_reused().holds(&["condemned pack relied on", "lost pack not relied on", "object deleted"]);
    repacked_and_swept().holds(&["nothing to swap", "object deleted"]);
}

#[test]
fn names_that_are_taken_back() {
    removed_and_undeleted().holds(&["undeleted", "nothing to undelete", "object deleted"]);
    undeleted_twice().holds(&["undeleted", "nothing to undelete", "object deleted"]);
    undeleted_while_repacked().holds(&["undeleted", "nothing to undelete", "object deleted"]);
}

#[test]
fn damage_in_an_open_session() {
    damaged_in_an_open_session(adds_only()).holds(&["object deleted"]);
    damaged_in_an_open_session(save("a")).holds(&["commit refused", "object deleted"]);
}

#[test]
fn rules_about_packs_are_needed() {
    reuse_against_two_collectors().misses(Mutation::NoVouch);
    reuse_against_two_collectors().misses(Mutation::NoPardon);
    two_writers_two_collectors().misses(Mutation::PurgeAnyAt);
    reuse_against_two_collectors().misses(Mutation::NoRemark);
    memory_of_purges().misses(Mutation::ForgetEarly);
    memory_of_purges().misses(Mutation::AgelessKnowledge);
    replaced_behind_the_back().misses(Mutation::ReplaceBuiltNow);
    fenced_and_swept().misses(Mutation::SaveUnbound);
    fenced_and_swept().misses(Mutation::FenceAnyTouched);
    copied_and_removed().misses(Mutation::CopyBlindly);
    damaged_in_an_open_session(adds_only()).misses(Mutation::AddBuiltNow);
    removed_and_undeleted().misses(Mutation::UndeleteBlindly);
    removed_and_undeleted().misses(Mutation::MarkNamesAlone);
}

#[test]
fn a_sweep_lists_before_it_folds() {
    let swept = |sweep: [Step; 3]| scenario(vec![save("a"), sweep.to_vec()], saved, 1);
    swept([List, Look, Sweep]).holds(&[]);
    let report = swept([Look, List, Sweep]).run(None);
    assert!(report.violation.is_some(), "a sweep that folds first deletes what a writer has just uploaded");
}

#[test]
fn a_session_opens_before_it_uploads() {
    let early = vec![Look, PutPack, PutSegment, Commit(Open), Commit(AddSegment), PutMap, Commit(Save("a"))];
    let report = scenario(vec![early, vec![List, Look, Sweep]], saved, 0).run(None);
    assert!(report.violation.is_some(), "uploads of a session that is not open yet are swept");
}

// The log itself: truncation.

fn copies_to_one_name() -> Scenario {
    let copies = vec![vec![Commit(Copy("x", "z"))], vec![Commit(Copy("y", "z"))], TRUNCATE.to_vec()];
    scenario(copies, saved_twice, 2)
}

fn sessions_under_truncation() -> Scenario {
    let scripts = vec![vec![Commit(Close)], vec![Commit(Open), Commit(Close)], TRUNCATE.to_vec()];
    scenario(scripts, saved_twice_and_session, 1)
}

fn two_truncations() -> Scenario {
    let copies = vec![Commit(Copy("x", "z")), Look, Commit(Remove("z"))];
    scenario(vec![copies, TRUNCATE.to_vec(), TRUNCATE.to_vec()], saved_twice, 1)
}

/// The reader knows nothing, or the past: what it reads then may be a stray and what does not follow from it.
fn strays_before_a_reader(cold: bool) -> Scenario {
    let copies = vec![Commit(Copy("x", "z")), Look, Commit(Remove("z"))];
    let scripts = vec![copies, vec![Commit(Copy("y", "w"))], TRUNCATE.to_vec(), vec![Look]];
    let cold_reader = |model: &mut Model, world: &mut World| {
        saved_twice(model, world);
        world.actors[3].seen = 0;
    };
    scenario(scripts, if cold { cold_reader } else { saved_twice }, 0)
}

fn fenced_under_truncation() -> Scenario {
    let saver = vec![PutPack, PutMap, Commit(Save("z"))];
    let others = [vec![Commit(Fence(0))], vec![Commit(Copy("x", "z"))], TRUNCATE.to_vec()];
    scenario([vec![saver], others.to_vec()].concat(), saved_twice_and_session, 0)
}

#[test]
fn two_writers_and_a_truncation() {
    copies_to_one_name().holds(&["race lost", "fate unknown", "committed, the state says"]);
}

#[test]
fn two_sessions_and_a_truncation() {
    sessions_under_truncation().holds(&["race lost", "fate unknown", "late create took effect"]);
}

#[test]
fn a_writer_and_two_truncations() {
    two_truncations().holds(&["stray entry under a name that was cut away"]);
}

#[test]
fn strays_and_a_reader() {
    strays_before_a_reader(true).holds(&["fold overtaken by a boundary", "fold spoilt by a stray"]);
}

#[test]
fn a_fence_and_a_truncation() {
    fenced_under_truncation().holds(&["session fenced", "committed, the state says", "fate unknown"]);
}

#[test]
fn rules_about_the_log_are_needed() {
    copies_to_one_name().misses(Mutation::NoBoundaryAfterCreate);
    copies_to_one_name().misses(Mutation::BelieveExists);
    copies_to_one_name().misses(Mutation::FateByVersion);
    strays_before_a_reader(false).misses(Mutation::NoBoundaryAfterFold);
    strays_before_a_reader(false).misses(Mutation::DamageBeforeBoundary);
    fenced_under_truncation().misses(Mutation::FateByVersion);
    let cut_first = vec![Look, Bound, Snapshot, Choose, ListCut, Cut, Raise];
    let copies = vec![vec![Commit(Copy("x", "z"))], vec![Commit(Copy("y", "z"))], cut_first];
    scenario(copies, saved_twice, 0).misses(Mutation::CutFirst);
}
