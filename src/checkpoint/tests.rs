//! Tests: real headers are parsed; hostile ones are refused, each with its own error.

use std::fmt::Write as _;

use proptest::prelude::*;

use super::safetensors::{ParseError, header_len, parse};
use super::*;
use crate::codec::Width;
use crate::limits::{RANK_MAX, TENSORS_MAX};

/// A file's first bytes around `json`.
fn header(json: &str) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()
}

/// Reads `json` as the header of a file with `buffer_len` bytes behind it.
fn read(json: &str, buffer_len: u64) -> Result<Layout, ParseError> {
    let header = header(json);
    parse(&header, header.len() as u64 + buffer_len)
}

fn refusal(json: &str) -> ParseError {
    read(json, 100).expect_err(json)
}

#[test]
fn a_header_is_read_and_sorted_by_offset() {
    let json = r#"{"__metadata__":{"format":"pt"},
        "b.weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
        "a\u00e9":{"shape":[],"dtype":"F32","data_offsets":[0,4]},
        "none":{"dtype":"F32","shape":[0,9],"data_offsets":[4,4]},
        "odd":{"dtype":"F3","shape":[7],"data_offsets":[20,23],"extra":[{"x":null}]}}     "#;
    let layout = read(json, 40).unwrap();
    let base = json.len() as u64 + 8;
    let names: Vec<&str> = layout.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["a\u{e9}", "none", "b.weight", "odd"]);
    let weight = &layout.tensors[2];
    assert_eq!((weight.start, weight.end), (base + 4, base + 16));
    assert_eq!((&weight.dtype, &*weight.shape), (&Dtype::BF16, &[2, 3][..]));
    assert_eq!(layout.tensors[3].dtype.word(), "F3");
}

#[test]
fn an_empty_file_of_tensors_is_one() {
    assert_eq!(read("{}", 0).unwrap().tensors, []);
    assert_eq!(read(r#"{"__metadata__":{}}   "#, 5).unwrap().tensors, []);
}

#[test]
fn spans_tell_rows_and_elements_and_leave_empty_tensors_out() {
    let json = r#"{"empty":{"dtype":"F32","shape":[0,8],"data_offsets":[0,0]},
        "matrix":{"dtype":"F32","shape":[3,8],"data_offsets":[0,96]},
        "packed":{"dtype":"F4","shape":[2,32],"data_offsets":[96,128]},
        "scalar":{"dtype":"BF16","shape":[],"data_offsets":[128,130]}}"#;
    let layout = read(json, 130).unwrap();
    let base = json.len() as u64 + 8;
    let span = |start, end, element, row| Span { start: base + start, end: base + end, element, row };
    assert_eq!(layout.spans(), [span(0, 96, 4, 32), span(96, 128, 0, 16), span(128, 130, 2, 0)]);
}

#[test]
fn a_stretch_has_numbers_if_all_of_it_are_whole_and_of_one_kind() {
    let json = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},
        "none":{"dtype":"I8","shape":[0],"data_offsets":[16,16]},
        "b":{"dtype":"F32","shape":[2],"data_offsets":[16,24]},
        "c":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},
        "odd":{"dtype":"F3","shape":[7],"data_offsets":[40,47]}}"#;
    let layout = read(json, 60).unwrap();
    let base = json.len() as u64 + 8;
    let at = |start: u64, end: u64| layout.number_in(&(base + start..base + end));
    let (f32, bf16) = (Some(Element::Float(Width::W4)), Some(Element::Float(Width::W2)));
    assert_eq!(at(0, 16), f32);
    assert_eq!(at(4, 12), f32);
    assert_eq!(at(8, 24), f32, "neighbours of one kind");
    assert_eq!(at(24, 32), bf16);
    assert_eq!(at(2, 16), None, "not at the start of a number");
    assert_eq!(at(16, 32), None, "two kinds");
    assert_eq!(at(24, 40), None, "something else behind it");
    assert_eq!(at(40, 47), None, "unknown numbers");
    assert_eq!(layout.number_in(&(0..8)), None, "the header");
}

#[test]
fn a_file_is_recognised_by_its_first_bytes() {
    let real = header("{}");
    assert_eq!(header_len(&real, 10), Some(10));
    assert_eq!(header_len(&real, 9), None);
    assert_eq!(header_len(&real[..8], 10), None);
    assert_eq!(header_len(&header(" {}"), 99), None);
    assert_eq!(header_len(b"PK\x03\x04\x14\0\0\0{", u64::MAX), None);
    for hostile in [u64::MAX, u64::MAX - 7, 100_000_001, 0, 1] {
        assert_eq!(header_len(&[&hostile.to_le_bytes()[..], b"{}"].concat(), u64::MAX), None, "{hostile}");
    }
}

#[test]
fn each_lie_is_refused_for_what_it_is() {
    let tensor = |fields: &str| format!(r#"{{"t":{{{fields}}}}}"#);
    let offsets = |from: &str| refusal(&tensor(&format!(r#""dtype":"U8","shape":[4],"data_offsets":{from}"#)));
    assert!(matches!(offsets("[8,4]"), ParseError::OutOfRange { start: 8, end: 4, buffer_len: 100, .. }));
    assert!(matches!(offsets("[97,101]"), ParseError::OutOfRange { .. }));
    assert!(matches!(offsets("[0,18446744073709551615]"), ParseError::OutOfRange { .. }));
    assert!(matches!(offsets("[0,5]"), ParseError::Mismatch { got: 5, .. }));
    assert!(matches!(offsets("[-1,3]"), ParseError::Json(_)));
    assert!(matches!(offsets("[0,4,8]"), ParseError::Json(_)));
    assert!(matches!(offsets("[0.0,4.0]"), ParseError::Json(_)));
    assert!(matches!(offsets("[0,18446744073709551616]"), ParseError::Json(_)));
    let shape = |shape: &str| refusal(&tensor(&format!(r#""dtype":"F32","shape":{shape},"data_offsets":[0,4]"#)));
    assert!(matches!(shape("[4294967296,4294967296]"), ParseError::Mismatch { .. }));
    assert!(matches!(shape(&format!("[{}1]", "1,".repeat(RANK_MAX))), ParseError::Json(_)));
    assert!(matches!(refusal(&tensor(r#""dtype":"U8","shape":[4]"#)), ParseError::Json(_)));
    assert!(matches!(refusal("{} {}"), ParseError::Json(_)));
    assert!(matches!(refusal("{\"a"), ParseError::Json(_)));
}

#[test]
fn two_of_a_name_or_a_place_are_refused() {
    let one = |name: &str, from: u64| {
        format!(r#""{name}":{{"dtype":"U8","shape":[4],"data_offsets":[{from},{}]}}"#, from + 4)
    };
    let twice = format!("{{{},{}}}", one("t", 0), one("\\u0074", 4));
    assert!(matches!(refusal(&twice), ParseError::Duplicate { name } if name == "t"));
    assert!(matches!(refusal(r#"{"__metadata__":{},"__metadata__":{}}"#), ParseError::Duplicate { .. }));
    let over = format!("{{{},{}}}", one("later", 3), one("first", 0));
    let ParseError::Overlap { first, second } = refusal(&over) else { panic!("{over}") };
    assert_eq!((first.as_str(), second.as_str()), ("first", "later"));
}

#[test]
fn bombs_are_refused_cheaply() {
    let deep = format!(r#"{{"__metadata__":{}}}"#, "[".repeat(2_000_000));
    assert!(matches!(refusal(&deep), ParseError::Json(_)));
    let mut many = String::from("{\"__metadata__\":{}");
    for nth in 0..=TENSORS_MAX {
        write!(many, r#","{nth:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#).unwrap();
    }
    many.push('}');
    assert!(matches!(refusal(&many), ParseError::TooManyTensors));
    let wide = format!(r#"{{"t":{{"dtype":"U8","shape":[{}1],"data_offsets":[0,1]}}}}"#, "1,".repeat(2_000_000));
    assert!(matches!(refusal(&wide), ParseError::Json(_)));
}

#[test]
fn half_a_header_says_how_much_is_missing() {
    let whole = header(r#"{"__metadata__":{}}"#);
    let got = parse(&whole[..12], 1000);
    assert!(matches!(got, Err(ParseError::Short { expected: 27, got: 12 })), "{got:?}");
}

#[test]
fn what_no_manifest_can_hold_is_not_understood() {
    let look = |json: &str| {
        let file = [header(json), vec![0; 4]].concat();
        parse_layout(&mut in_memory(&file), file.len() as u64, &mut |_| true)
    };
    let entry =
        |name: &str, dtype: &str| format!(r#"{{"{name}":{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,4]}}}}"#);
    assert_eq!(look(&entry("w", "F32")).unwrap().map(|layout| layout.tensors.len()), Some(1));
    let (name, dtype) = ("n".repeat(TENSOR_NAME_MAX + 1), "F".repeat(DTYPE_NAME_MAX + 1));
    assert!(look(&entry(&name[1..], &dtype[1..])).is_ok());
    assert!(matches!(look(&entry(&name, "F32")), Err(NotParsed::LongName { .. })));
    assert!(matches!(look(&entry("w", &dtype)), Err(NotParsed::LongName { .. })));
}

#[test]
fn any_other_file_is_just_bytes() {
    // The end of an archive of nothing, after four bytes.
    let archive = [&b"PK\x03\x04PK\x05\x06"[..], &[0; 12], &[4, 0, 0, 0, 0, 0]].concat();
    for file in [&b""[..], b"PK\x03\x04", b"\x80\x02N.", &archive] {
        assert_eq!(parse_layout(&mut in_memory(file), file.len() as u64, &mut |_| true).unwrap(), None, "{file:?}");
    }
}

proptest! {
    #[test]
    fn reading_in_blocks_gives_the_same_bytes(
        len in 0_usize..20_000, reads in proptest::collection::vec((0_usize..21_000, 0_usize..5000), 1..40),
    ) {
        let file: Vec<u8> = (0..len).map(|at| at.to_le_bytes()[0] ^ at.to_le_bytes()[1]).collect();
        let mut direct = in_memory(&file);
        let mut blocks = in_blocks(&mut direct, len as u64);
        for (at, len) in reads {
            let mut out = vec![0; len];
            let found = blocks(at as u64, &mut out).ok().map(|()| out.as_slice());
            prop_assert_eq!(found, file.get(at..at + len));
        }
    }

    #[test]
    fn damage_never_panics_and_never_yields_an_unsound_layout(
        at in 0_usize..170, byte in any::<u8>(), file_len in 0_u64..400,
    ) {
        let json = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"__metadata__":{"k":"v"},"b":{"dtype":"F16","shape":[2,3],"data_offsets":[4,16]}}"#;
        let mut bytes = header(json);
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(layout) = parse(&bytes, file_len) {
            let mut end = 8;
            for tensor in &layout.tensors {
                prop_assert!(tensor.start >= end && tensor.end >= tensor.start && tensor.end <= file_len);
                end = tensor.end;
            }
        }
    }
}
