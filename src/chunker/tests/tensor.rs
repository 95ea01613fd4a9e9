//! Tensor cutting: pieces that two checkpoints share.

use proptest::prelude::*;

use super::assert_covers;
use crate::chunker::tensor::{PIECE_ELEMENTS, PIECE_LEN_MAX, SHARED_LEN_MAX, SMALL_LEN, Span, cuts};
use crate::limits::{KIB, MIB};

fn span(start: u64, len: u64, element: u32, row: u64) -> Span {
    Span { start, end: start + len, element, row }
}

fn all(spans: &[Span], len: u64) -> Vec<u64> {
    let cuts: Vec<u64> = cuts(spans, len).collect();
    assert_covers(&cuts, len, PIECE_LEN_MAX);
    cuts
}

/// Offsets from `start`, counted in `unit`, of the cuts of one matrix that stands alone behind a header.
fn matrix(rows: u64, row: u64, element: u32) -> Vec<u64> {
    let (start, unit) = (1001, u64::from(element));
    let len = rows * row * unit;
    let cuts = all(&[span(start, len, element, row * unit)], start + len);
    assert_eq!(cuts[0], start);
    cuts[1..].iter().map(|cut| (cut - start) / unit).collect()
}

#[test]
fn a_copy_in_another_type_has_the_same_pieces() {
    for (rows, row) in [(4096, 4096), (300, 11008), (1, 1_000_003), (2_000_000, 1), (7, 300_000)] {
        let master = matrix(rows, row, 4);
        assert_eq!(matrix(rows, row, 2), master);
        assert_eq!(matrix(rows, row, 8), master);
        assert_eq!(matrix(rows, row, 1), master);
    }
}

#[test]
fn pieces_are_256_ki_elements_where_rows_allow() {
    assert_eq!(matrix(512, 1024, 2), [PIECE_ELEMENTS, 2 * PIECE_ELEMENTS]);
    assert_eq!(matrix(600_000, 1, 4), [PIECE_ELEMENTS, 2 * PIECE_ELEMENTS, 600_000]);
    // 23 rows of 11008 would fit; 16 divide the usual shards.
    assert_eq!(matrix(40, 11008, 2), [16 * 11008, 32 * 11008, 40 * 11008]);
}

#[test]
fn shards_by_rows_have_the_pieces_of_the_whole() {
    let (rows, row) = (4096, 11008);
    let whole = matrix(rows, row, 2);
    for shards in [2, 4, 8, 64] {
        let part = matrix(rows / shards, row, 2);
        let parts: Vec<u64> =
            (0..shards).flat_map(|nth| part.iter().map(move |cut| nth * (rows / shards) * row + cut)).collect();
        assert_eq!(parts, whole, "{shards} shards");
    }
}

#[test]
fn a_long_row_is_cut_in_equal_pieces_from_its_own_start() {
    let row = PIECE_ELEMENTS + 64;
    assert_eq!(matrix(2, row, 2), [row / 2, row, row + row / 2, 2 * row]);
    let row = 4 * PIECE_ELEMENTS;
    assert_eq!(matrix(1, row, 4), (1..=4).map(|nth| nth * PIECE_ELEMENTS).collect::<Vec<_>>());
}

#[test]
fn wide_elements_keep_to_the_byte_limit() {
    assert_eq!(matrix(1, 4 * PIECE_ELEMENTS, 16)[0], PIECE_ELEMENTS / 2);
}

#[test]
fn small_neighbours_share_a_chunk_and_large_ones_part_them() {
    let (header, small, large) = (100, 3 * KIB, SMALL_LEN);
    let mut spans = vec![span(header, small, 4, 0), span(header + small, small, 4, 0)];
    spans.push(span(header + 2 * small, large, 4, 0));
    spans.push(span(header + 2 * small + large, small, 4, 0));
    let len = header + 3 * small + large;
    assert_eq!(all(&spans, len), [header, header + 2 * small, header + 2 * small + large, len]);
}

#[test]
fn a_shared_chunk_holds_whole_tensors_up_to_its_limit() {
    let spans: Vec<Span> = (0..1000).map(|nth| span(nth * 3 * KIB, 3 * KIB, 2, 0)).collect();
    let got = all(&spans, 3000 * KIB);
    let full = SHARED_LEN_MAX / (3 * KIB) * 3 * KIB;
    assert_eq!(got[..3], [full, 2 * full, 3 * full]);
    assert_eq!(got.len(), 1000_usize.div_ceil(85));
}

#[test]
fn gaps_never_share_a_chunk_with_a_tensor() {
    let spans = [span(600 * KIB, KIB, 4, 0), span(602 * KIB, KIB, 4, 0)];
    let got = all(&spans, 604 * KIB);
    assert_eq!(got, [256, 512, 600, 601, 602, 603, 604].map(|kib| kib * KIB));
}

#[test]
fn no_spans_is_one_gap_and_no_bytes_no_cuts() {
    assert_eq!(all(&[], 300 * KIB), [256 * KIB, 300 * KIB]);
    assert_eq!(all(&[], 0), [] as [u64; 0]);
}

#[test]
fn spans_that_lie_are_passed_over() {
    let good = span(MIB, MIB, 4, 0);
    let honest = all(&[good], 3 * MIB);
    let past_the_end = Span { start: 2 * MIB, end: u64::MAX, element: 4, row: 4 };
    let backwards = Span { start: 2 * MIB + 9, end: 2 * MIB, element: 4, row: 4 };
    assert_eq!(all(&[good, span(MIB + 5, 5, 4, 0), backwards, past_the_end], 3 * MIB), honest);
    // A row that does not divide its tensor, or splits an element, is not believed.
    assert_eq!(all(&[span(MIB, MIB, 4, 3 * KIB + 4)], 3 * MIB), honest);
    assert_eq!(all(&[span(MIB, MIB, 4, 2)], 3 * MIB), honest);
}

proptest! {
    #[test]
    fn any_spans_are_covered(
        parts in prop::collection::vec((0..3_u64, 0..3 * MIB, 0..20_u32, 0..100_000_u64), 0..40),
        tail in 0..MIB,
    ) {
        let (mut spans, mut at) = (Vec::new(), 0);
        for (gap, len, element, row) in parts {
            at += gap * 77;
            // Half of the tensors small, so that runs occur.
            let len = if row % 2 == 0 { len % (40 * KIB) } else { len };
            spans.push(span(at, len, element, row));
            at += len;
        }
        let got = all(&spans, at + tail);
        for span in spans.iter().filter(|span| span.end - span.start >= SMALL_LEN) {
            prop_assert!(span.start == 0 || got.binary_search(&span.start).is_ok());
            prop_assert!(got.binary_search(&span.end).is_ok());
        }
    }

    #[test]
    fn nonsense_neither_panics_nor_uncovers(
        parts in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>()), 0..20),
        len in 0..64 * MIB,
    ) {
        let spans: Vec<Span> = parts
            .into_iter()
            .map(|(start, end, element, row)| Span { start: start.into(), end: end.into(), element, row })
            .collect();
        all(&spans, len);
    }
}
