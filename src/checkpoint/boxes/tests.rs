//! Boxes against a tensor that is just a list of numbered elements.

use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::error::ErrorKind;

/// Every index of a box, in row-major order.
fn indices(of: &TensorBox) -> Vec<Vec<u64>> {
    let mut all = vec![Vec::new()];
    for (from, len) in of.dimensions() {
        let longer = |index: &Vec<u64>| (from..from + len).map(|at| [&index[..], &[at]].concat()).collect::<Vec<_>>();
        all = all.iter().flat_map(longer).collect();
    }
    all
}

/// Index of an element in a row-major box.
fn rank_in(of: &TensorBox, index: &[u64]) -> u64 {
    of.dimensions().zip(index).fold(0, |at, ((from, len), index)| at * len + (index - from))
}

fn tensor_box(ranges: &[Range<u64>]) -> TensorBox {
    TensorBox {
        offsets: ranges.iter().map(|range| range.start).collect(),
        shape: ranges.iter().map(|range| range.end - range.start).collect(),
    }
}

/// A box within `shape`, sometimes empty.
fn box_in(shape: &[u64]) -> impl Strategy<Value = TensorBox> + use<> {
    let ranges: Vec<_> = shape.iter().map(|&len| (0..=len, 0..=len).prop_map(|(a, b)| a.min(b)..a.max(b))).collect();
    ranges.prop_map(|ranges| tensor_box(&ranges))
}

/// Some boxes; often with one more and everything around it, so that nothing is missing.
fn complete((mut parts, one, whole): (Vec<TensorBox>, TensorBox, Option<TensorBox>)) -> Vec<TensorBox> {
    if let Some(whole) = whole {
        parts.extend(whole.without(&one));
        parts.push(one);
    }
    parts
}

fn shapes() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(1..6_u64, 0..=4)
}

proptest! {
    /// Whatever parts hold, the runs of their cover bring each wanted element from where a part has it, once; asked for by
    /// windows of the file, they come to the same.
    #[test]
    fn runs_bring_what_indexing_finds(
        (shape, wanted, parts) in shapes().prop_flat_map(|shape| {
            let parts = prop::collection::vec(box_in(&shape), 0..6);
            (Just(shape.clone()), box_in(&shape), (parts, box_in(&shape), prop::option::weighted(0.8, Just(TensorBox::whole(&shape)))).prop_map(complete))
        }),
        element in 1..9_u64,
        window in 1..40_u64,
    ) {
        let whole = TensorBox::whole(&shape);
        let covered = match cover(&wanted, &parts) {
            Ok(covered) => covered,
            Err(Uncovered::Hole(hole)) => {
                prop_assert!(!hole.is_empty() && wanted.contains(&hole));
                for index in indices(&hole) {
                    let one = TensorBox { offsets: index.clone(), shape: vec![1; index.len()] };
                    prop_assert!(parts.iter().all(|part| !part.contains(&one)));
                }
                return Ok(());
            }
            Err(other) => panic!("{other}"),
        };
        let elements = wanted.shape.iter().product::<u64>();
        let mut found = vec![None; usize::try_from(elements * element).unwrap()];
        for (at, common) in &covered {
            let (part, start) = (&parts[*at], 1000);
            let runs = Runs::new(common, part, &wanted, element, start);
            let listed: Vec<Run> = runs.within(0..u64::MAX).collect();
            prop_assert_eq!(listed.len() as u64, runs.count());
            prop_assert!(listed.windows(2).all(|two| two[0].source.end <= two[1].source.start));
            let together = |two: &[Run]| {
                let (len, gap) = (two[0].source.end - two[0].source.start, two[1].source.start - two[0].source.end);
                gap == 0 && two[0].target + len == two[1].target
            };
            prop_assert!(!listed.windows(2).any(together), "runs that lie together are one");
            let held = indices(part);
            let span = runs.span();
            let mut from = span.start;
            while from < span.end {
                let bytes: u64 = runs.within(from..from + window).map(|run| run.source.end - run.source.start).sum();
                prop_assert_eq!(runs.bytes_within(from..from + window), bytes);
                for run in runs.within(from..from + window) {
                    for (byte, target) in run.source.clone().zip(run.target..) {
                        prop_assert!((from..from + window).contains(&byte));
                        let index = &held[usize::try_from((byte - start) / element).unwrap()];
                        let slot = &mut found[usize::try_from(target).unwrap()];
                        prop_assert!(slot.is_none(), "given twice");
                        *slot = Some(rank_in(&whole, index) * element + (byte - start) % element);
                    }
                }
                from += window;
            }
        }
        let expected = indices(&wanted).into_iter().flat_map(|index| {
            let at = rank_in(&whole, &index) * element;
            (at..at + element).map(Some)
        });
        prop_assert_eq!(found, expected.collect::<Vec<_>>());
    }

    #[test]
    fn shards_are_the_whole_in_order(rows in 0..40_u64, of in 1..12_u64) {
        let mut at = 3;
        for index in 0..of {
            let shard = Shard::new(index, of).unwrap().within(tensor_box(&[3..3 + rows, 0..2]));
            prop_assert_eq!((shard.offsets[0], shard.shape[1]), (at, 2));
            prop_assert!(shard.shape[0] <= rows.div_ceil(of));
            at += shard.shape[0];
        }
        prop_assert_eq!(at, 3 + rows);
    }

    #[test]
    fn boxes_read_as_they_are_shown(ranges in prop::collection::vec((0..9_u64, 0..9_u64), 1..4)) {
        let ranges: Vec<_> = ranges.into_iter().map(|(from, len)| from..from + len).collect();
        let (found, shape) = (tensor_box(&ranges), vec![20; ranges.len()]);
        let read: Slices = found.to_string().parse().unwrap();
        prop_assert_eq!(read.within(&shape).unwrap(), found.clone());
        prop_assert_eq!(Slices::of(ranges).within(&shape).unwrap(), found);
    }
}

#[test]
fn slices_read_as_numpy_reads_them() {
    for (text, ranges) in [
        ("[0:128, :, 3:5]", [0..128, 0..7, 3..5]),
        ("[:]", [0..200, 0..7, 0..9]),
        (" [ -3: , :-1,2 :2] ", [197..200, 0..6, 2..2]),
        ("[200:]", [200..200, 0..7, 0..9]),
    ] {
        let slices: Slices = text.parse().unwrap();
        assert_eq!(slices.within(&[200, 7, 9]).unwrap(), tensor_box(&ranges), "{text}");
    }
    for text in [
        "0:3",
        "[",
        "[]",
        "[3]",
        "[0:3:2]",
        "[a:b]",
        "[0:3,]",
        "[...]",
        "[0:1e3]",
        &format!("[{}]", [":"; 65].join(",")),
    ] {
        assert_eq!(text.parse::<Slices>().unwrap_err().kind(), ErrorKind::Usage, "{text}");
    }
    for text in ["[0:201]", "[5:4]", "[-201:]", "[:, :, :, :]", "[340282366920938463463374607431768211455:]"] {
        let refused = text.parse::<Slices>().and_then(|slices| slices.within(&[200, 7, 9]));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Usage, "{text}");
    }
    assert_eq!(Slices::default().within(&[]).unwrap(), TensorBox::default());
}

#[test]
fn shards_are_asked_for_by_two_numbers() {
    assert_eq!("3/8".parse::<Shard>().unwrap(), Shard::new(3, 8).unwrap());
    for text in ["8/8", "0/0", "1", "a/2", "-1/2", "1/2/3"] {
        assert_eq!(text.parse::<Shard>().unwrap_err().kind(), ErrorKind::Usage, "{text}");
    }
    assert_eq!(Shard::new(1, 2).unwrap().within(TensorBox::default()), TensorBox::default());
}

/// Scalars have one element; what is in one part is taken from one, whatever else is there.
#[test]
fn one_part_is_enough() {
    let scalar = TensorBox::default();
    assert_eq!(cover(&scalar, std::slice::from_ref(&scalar)).unwrap(), [(0, scalar.clone())]);
    assert_eq!(cover(&scalar, &[]), Err(Uncovered::Hole(scalar.clone())));
    assert_eq!(
        Runs::new(&scalar, &scalar, &scalar, 4, 9).within(0..20).collect::<Vec<_>>(),
        [Run { source: 9..13, target: 0 }]
    );
    let (left, all) = (tensor_box(&[0..4, 0..2]), tensor_box(&[0..4, 0..9]));
    assert_eq!(cover(&all, &[left, all.clone(), all.clone()]).unwrap(), [(1, all)]);
}

/// Dimensions that no memory could hold cost nothing.
#[test]
fn huge_boxes_are_cheap() {
    let side = 1 << 30;
    let whole = TensorBox::whole(&[side, side]);
    let column = tensor_box(&[0..side, 7..8]);
    let runs = Runs::new(&column, &whole, &column, 4, 0);
    assert_eq!((runs.count(), runs.span()), (side, 28..(side - 1) * side * 4 + 32));
    let late = (side - 5) * side * 4;
    let found: Vec<Run> = runs.within(late..late + 32).collect();
    assert_eq!(found, [Run { source: late + 28..late + 32, target: (side - 5) * 4 }]);
    let empty = TensorBox::whole(&[0, u64::MAX, u64::MAX]);
    assert_eq!(Runs::new(&empty, &empty, &empty, 8, 5).span(), 5..5);
}

#[test]
fn parts_that_overlap_without_end_are_refused() {
    let sizes = [8; 8];
    let slab = |dimension, at| {
        let mut part = TensorBox::whole(&sizes);
        part.set(dimension, at, 1);
        part
    };
    // Slabs across each other leave four pieces along each of eight dimensions.
    let parts: Vec<_> = (0..8).flat_map(|dimension| [1, 3, 5].map(|at| slab(dimension, at))).collect();
    assert_eq!(cover(&TensorBox::whole(&sizes), &parts), Err(Uncovered::TooManyPieces));
}
