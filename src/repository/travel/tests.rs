//! Plans by hand, and against every other choice.

use std::num::NonZeroU32;

use proptest::prelude::*;

use super::*;
use crate::codec::Codec;
use crate::format::{ChunkList, Frame, Manifest, Map, PackRef};
use crate::id::{ChunkId, Owned, SessionId};
use crate::name::Name;
use crate::repository::runs::tests::value;

/// A chunk of a test: base, stored length, length without the base (0: unknown).
pub(crate) type Row = (Option<u32>, u32, u32);

const PLAIN: u32 = 1000;

/// A tree of `listed` chunks, and bases outside of it.
pub(crate) fn tree(rows: &[Row], listed: usize) -> Saved {
    let codec = |row: &Row| match row.0 {
        None => Codec::Raw,
        Some(base) if rows[base as usize].0.is_none() => Codec::Difference,
        Some(_) => Codec::Derived,
    };
    let frame = |(nth, row): (usize, &Row)| Frame {
        pack: 0,
        ordinal: u32::try_from(nth).unwrap(),
        offset: 0,
        stored_len: row.1,
        codec: codec(row),
        base: row.0.and_then(|base| NonZeroU32::new(base + 1)),
        alone_len: row.2,
    };
    let ids: Vec<ChunkId> = (0..rows.len()).map(|nth| ChunkId::of(&nth.to_le_bytes())).collect();
    let pack = PackRef { id: Owned::fresh(SessionId::random()), len: 1 << 20, footer_len: 9, chunks: 100 };
    let map = Map {
        manifest: crate::id::ManifestId::of(b"tree"),
        packs: vec![pack],
        frames: rows.iter().enumerate().map(frame).collect(),
        further: ids[listed..].iter().map(|id| (*id, PLAIN)).collect(),
    };
    let chunks = ChunkList { ids: ids[..listed].to_vec(), lens: vec![PLAIN; listed] };
    let manifest = Manifest { chunks, ..Manifest::default() };
    let name: Name = "run/step-1".parse().unwrap();
    Saved::ruled_now(name, value(1, &[]), manifest, map)
}

/// Plan for a place that has some chunks, with all that they need.
pub(crate) fn plan_for(saved: &Saved, wanted: &[u32], senders: &[u32], held: &[u32]) -> TravelPlan {
    let held = |chunk| if held.contains(&chunk) { Held::Whole } else { Held::No };
    plan_where(saved, wanted, &|chunk| senders.contains(&chunk), &held)
}

fn plan_where(
    saved: &Saved,
    wanted: &[u32],
    may_come_alone: &dyn Fn(u32) -> bool,
    held: &dyn Fn(u32) -> Held,
) -> TravelPlan {
    plan_travel(&[TravelTree { saved, wanted, may_come_alone, held }]).unwrap().remove(0)
}

fn plan(saved: &Saved, wanted: &[u32], held: &[u32]) -> (Vec<u32>, Vec<u32>, u64) {
    let all: Vec<u32> = (0..saved.located_chunks()).collect();
    let plan = plan_for(saved, wanted, &all, held);
    (plan.as_stored, plan.alone, plan.bytes)
}

#[test]
fn a_base_travels_only_where_it_pays() {
    // A difference to a base outside of the tree.
    let one = tree(&[(Some(1), 500, 800), (None, 800, 0)], 1);
    assert_eq!(plan(&one, &[0], &[]), (vec![], vec![0], 800));
    assert_eq!(plan(&one, &[0], &[1]), (vec![0], vec![], 500), "the base is there");
    assert_eq!(plan(&one, &[0], &[0]), (vec![], vec![], 0), "all is there");
    assert_eq!(plan(&one, &[0, 1], &[]), (vec![0, 1], vec![], 1300), "the base is wanted");
    let as_stored = plan_for(&one, &[0], &[], &[]);
    assert_eq!((as_stored.as_stored, as_stored.bytes), (vec![0, 1], 1300));
    // Three dependents save more than the base has.
    let three = tree(&[(Some(3), 500, 800), (Some(3), 500, 800), (Some(3), 500, 800), (None, 800, 0)], 3);
    assert_eq!(plan(&three, &[0, 1, 2], &[]), (vec![0, 1, 2, 3], vec![], 2300));
    assert_eq!(plan(&three, &[0, 1], &[]), (vec![], vec![0, 1], 1600));
    assert_eq!(plan(&three, &[0, 1, 2], &[1, 2]), (vec![], vec![0], 800));
}

#[test]
fn trees_that_go_together_share_a_base() {
    // Two differences to the same base, which pays for both and not for one.
    let both = tree(&[(Some(2), 500, 1000), (Some(2), 450, 1000), (None, 800, 0)], 2);
    let (held, may): (&dyn Fn(u32) -> Held, &dyn Fn(u32) -> bool) = (&|_| Held::No, &|_| true);
    let of = |wanted| TravelTree { saved: &both, wanted, may_come_alone: may, held };
    assert_eq!(plan(&both, &[0], &[]), (vec![], vec![0], 1000));
    let plans = plan_travel(&[of(&[0]), of(&[1])]).unwrap();
    let as_stored: Vec<&[u32]> = plans.iter().map(|plan| plan.as_stored.as_slice()).collect();
    assert_eq!(as_stored, [[0, 2], [1, 2]]);
    assert_eq!(plans.iter().map(|plan| plan.needed.len()).collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn maps_that_contradict_each_other_leave_no_chunk_out() {
    // 1 is a difference to 0, or 0 to 1; together, either would be the base of the other.
    let (one, other) =
        (tree(&[(None, 1000, 0), (Some(0), 10, 900)], 2), tree(&[(Some(1), 10, 900), (None, 1000, 0)], 2));
    let trees = [&one, &other].map(|saved| TravelTree {
        saved,
        wanted: &[0, 1],
        may_come_alone: &|_| false,
        held: &|_| Held::No,
    });
    for plan in plan_travel(&trees).unwrap() {
        assert_eq!((plan.travelling(), plan.needed, plan.bytes), (vec![0, 1], vec![0, 1], 2000));
    }
    // A base that has a base by another map, and so as many hops as its dependent.
    let (one, other) = (
        tree(&[(None, 1000, 0), (None, 900, 0), (Some(1), 10, 900)], 3),
        tree(&[(None, 1000, 0), (Some(0), 20, 900)], 2),
    );
    let trees = [(&one, &[0, 1, 2][..]), (&other, &[0, 1][..])].map(|(saved, wanted)| TravelTree {
        saved,
        wanted,
        may_come_alone: &|_| false,
        held: &|_| Held::No,
    });
    for (plan, all) in plan_travel(&trees).unwrap().into_iter().zip([vec![0, 1, 2], vec![0, 1]]) {
        assert_eq!(plan.travelling(), all);
    }
}

#[test]
fn chains_are_decided_as_a_whole() {
    // Half the bytes derived from a difference to a base: weights beside their masters.
    let chain = tree(&[(Some(1), 1, 400), (Some(2), 500, 800), (None, 800, 0)], 2);
    assert_eq!(plan(&chain, &[0, 1], &[]), (vec![0], vec![1], 801), "the master alone, and what derives from it");
    assert_eq!(plan(&chain, &[0], &[]), (vec![], vec![0], 400), "nothing but the derived");
    assert_eq!(plan(&chain, &[0], &[2]), (vec![], vec![0], 400), "the master would be more");
    assert_eq!(plan(&chain, &[0], &[1, 2]), (vec![0], vec![], 1));
    assert_eq!(plan(&chain, &[1], &[2]), (vec![1], vec![], 500));
}

#[test]
fn what_is_there_with_a_base_gets_it_and_is_not_sent_again() {
    let one = tree(&[(Some(1), 500, 800), (None, 800, 0)], 1);
    let held = |chunk| if chunk == 0 { Held::WithoutBase } else { Held::No };
    let plan = plan_where(&one, &[0], &|_| true, &held);
    assert_eq!((plan.as_stored, plan.alone, plan.bytes), (vec![1], vec![], 800));
    let held = |chunk| if chunk == 0 { Held::WithoutBase } else { Held::Whole };
    assert_eq!(plan_where(&one, &[0], &|_| true, &held).bytes, 0);
}

#[test]
fn lengths_that_were_not_recorded_are_estimated() {
    let mut saved = tree(&[(Some(1), 500, 0), (None, 700, 0)], 1);
    assert_eq!(saved.alone_len(0).unwrap(), AloneLen { bytes: 700, exact: false });
    assert_eq!(saved.alone_len(1).unwrap(), AloneLen { bytes: 700, exact: true });
    assert!(!plan_for(&saved, &[0], &[0], &[]).exact);
    // Numbers of two bytes, rounded from numbers of four.
    saved.map.further[0].1 = 2 * PLAIN;
    saved.map.frames[1].stored_len = 1700;
    assert_eq!(saved.alone_len(0).unwrap(), AloneLen { bytes: 700, exact: false });
    saved.map.frames[1].stored_len = 2000;
    assert_eq!(saved.alone_len(0).unwrap(), AloneLen { bytes: PLAIN, exact: false });
    // A recorded length is no longer than the chunk, whatever was recorded.
    saved.map.frames[0].alone_len = u32::MAX;
    assert_eq!(saved.alone_len(0).unwrap(), AloneLen { bytes: PLAIN, exact: true });
}

/// Fewest bytes, by trying every choice.
fn fewest(saved: &Saved, wanted: &[u32], held: &[u32]) -> u64 {
    let chunks = saved.located_chunks();
    let mut best = u64::MAX;
    'choices: for mut choice in 0..3_u32.pow(chunks) {
        let mut choices = Vec::new();
        for chunk in 0..chunks {
            let (sent, alone) = (!choice.is_multiple_of(3), choice % 3 == 2);
            choices.push((sent || held.contains(&chunk), sent, alone));
            choice /= 3;
        }
        let mut bytes = 0;
        for (chunk, (there, sent, alone)) in (0..).zip(&choices) {
            let located = saved.locate(chunk).unwrap();
            let needs = *sent && !alone && located.base.is_some_and(|base| !choices[base as usize].0);
            if needs || *alone && located.base.is_none() || wanted.contains(&chunk) && !there {
                continue 'choices;
            }
            let stored = if *alone { saved.alone_len(chunk).unwrap().bytes } else { located.place.stored_len };
            bytes += if *sent { u64::from(stored) } else { 0 };
        }
        best = best.min(bytes);
    }
    best
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// No other choice has fewer bytes, and everything that is wanted can be decoded.
    #[test]
    fn no_plan_has_fewer_bytes(
        lens in proptest::collection::vec((1u32..900, 1u32..900, 0usize..7), 6),
        wanted in proptest::collection::btree_set(0u32..6, 1..6),
        held in proptest::collection::btree_set(0u32..6, 0..3),
    ) {
        // Two roots, two differences, two derived: the later ones need one of the earlier.
        let base = |nth: usize, pick: usize| match nth {
            0 | 1 => None,
            2 | 3 => Some(u32::try_from(pick % 2).unwrap()),
            _ => Some(u32::try_from(2 + pick % 2).unwrap()),
        };
        let rows: Vec<Row> =
            lens.iter().enumerate().map(|(nth, &(stored, alone, pick))| (base(nth, pick), stored, alone)).collect();
        let saved = tree(&rows, 6);
        // Held chunks are held with their bases.
        let whole = |chunk: &u32| saved.locate(*chunk).unwrap().base.is_none();
        let held: Vec<u32> = held.into_iter().filter(whole).collect();
        let wanted: Vec<u32> = wanted.into_iter().collect();
        let (as_stored, alone, bytes) = plan(&saved, &wanted, &held);
        prop_assert_eq!(bytes, fewest(&saved, &wanted, &held));
        let there = |chunk: &u32| as_stored.contains(chunk) || alone.contains(chunk) || held.contains(chunk);
        prop_assert!(wanted.iter().all(there));
        let needed = plan_for(&saved, &wanted, &[0, 1, 2, 3, 4, 5], &held).needed;
        prop_assert!(needed.iter().all(there) && wanted.iter().all(|chunk| needed.contains(chunk)));
        for chunk in &as_stored {
            prop_assert!(saved.locate(*chunk).unwrap().base.is_none_or(|base| there(&base)));
        }
    }
}
