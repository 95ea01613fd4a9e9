//! Tests of metadata of distributed checkpoints, mostly hostile ones.

use super::*;
use crate::checkpoint::in_memory;

fn read(bytes: &[u8]) -> Result<Metadata, ParseError> {
    parse(bytes, &mut |_| true)
}

/// An object of a class, with a dict of this content for its state.
fn object(class: &str, fields: &[(&str, &[u8])]) -> Vec<u8> {
    object_of(CLASSES, class, fields)
}

fn object_of(module: &str, class: &str, fields: &[(&str, &[u8])]) -> Vec<u8> {
    let mut out = [format!("c{module}\n{class}\n").as_bytes(), b")\x81}("].concat();
    for (key, value) in fields {
        out.extend([b"X", &u32::try_from(key.len()).unwrap().to_le_bytes()[..], key.as_bytes(), value].concat());
    }
    out.extend(b"ub");
    out
}

/// The metadata of `tensors`, which all are one value, of `rank` dimensions of nothing in `parts` parts that are one too.
fn doubled(tensors: usize, rank: usize, parts: usize) -> Vec<u8> {
    let zeros = [&b"("[..], &b"K\0".repeat(rank), b"t"].concat();
    let chunk = object("ChunkStorageMetadata", &[("offsets", &zeros), ("sizes", &zeros)]);
    let chunks = [&b"]("[..], &chunk, b"q\0", &b"h\0".repeat(parts - 1), b"e"].concat();
    let properties = object("TensorProperties", &[]);
    let fields = [("properties", &properties[..]), ("size", &zeros), ("chunks", &chunks)];
    let tensor = object("TensorStorageMetadata", &fields);
    let mut all = [b"}(X\x01\0\0\0t", &tensor[..], b"q\x01"].concat();
    (1..tensors).for_each(|_| all.extend(b"X\x01\0\0\0th\x01"));
    all.push(b'u');
    let metadata = object("Metadata", &[("state_dict_metadata", &all), ("storage_data", b"}")]);
    [&b"\x80\x02"[..], &metadata, b"."].concat()
}

#[test]
fn what_one_value_says_many_times_over_is_refused_before_it_is_kept() {
    assert_eq!(read(&doubled(3, 2, 5)).unwrap().boxes.len(), 60);
    assert_eq!(read(&doubled(2, 0, 1)).unwrap().tensors.len(), 2);
    let refused = |bytes: &[u8]| matches!(read(bytes), Err(ParseError::Metadata(what)) if what.starts_with("too many"));
    assert!(refused(&doubled(1, RANK_MAX, 1_000_000)));
    assert!(refused(&doubled(1000, 1, 1_000_000)));
    assert!(refused(&doubled(500_000, 0, 1_000_000)));
}

#[test]
fn an_object_with_very_many_attributes_is_refused_at_once() {
    // One state of very many tensors, which each would look through.
    let junk: Vec<u8> = (0..100_000_u32).flat_map(|nth| [&b"J"[..], &nth.to_le_bytes(), b"N"].concat()).collect();
    let state = [&b"}("[..], &junk, b"u"].concat();
    let class = format!("c{CLASSES}\nTensorStorageMetadata\n");
    let tensor = [class.as_bytes(), b")\x81", &state, b"bq\0"].concat();
    let mut all = [b"}(X\x01\0\0\0t", &tensor[..]].concat();
    (0..100_000).for_each(|_| all.extend(b"X\x01\0\0\0th\0"));
    all.push(b'u');
    let metadata = object("Metadata", &[("state_dict_metadata", &all), ("storage_data", b"}")]);
    let refused = read(&[&b"\x80\x02"[..], &metadata, b"."].concat());
    assert!(matches!(refused, Err(ParseError::Metadata("a tensor is not described as one"))), "{refused:?}");
}

#[test]
fn many_places_of_a_long_name_take_no_time_and_tensors_are_reserved() {
    const LEN: u32 = 1_000_000;
    let long = [&b"X"[..], &LEN.to_le_bytes(), &b"t".repeat(LEN as usize)].concat();
    let index = [object("MetadataIndex", &[("fqn", &long)]), b"q\0".to_vec()].concat();
    let places = [&b"}("[..], &index, b"N", &b"h\0N".repeat(LEN as usize / 4), b"u"].concat();
    let metadata = object("Metadata", &[("state_dict_metadata", b"}"), ("storage_data", &places)]);
    let bytes = [&b"\x80\x02"[..], &metadata, b"."].concat();
    assert!(read(&bytes).unwrap().files.is_empty());

    let bytes = doubled(10_000, 8, 16);
    assert_eq!(read(&bytes).unwrap().boxes.len(), 10_000 * 16 * 16);
    let mut left = 4_i64 << 20;
    let mut reserve = |bytes: u64| {
        left -= i64::try_from(bytes).unwrap();
        left >= 0
    };
    assert!(matches!(parse(&bytes, &mut reserve), Err(ParseError::Memory)));
    assert!(left > -(1 << 20), "{left}");
}

/// The metadata of a tensor `t` of two fp32 numbers, whose one part is the whole of the file `f` of `len` bytes.
fn one_part(len: usize) -> Metadata {
    let sizes = |number: u8| [b'(', b'K', number, b't'];
    let chunk = object("ChunkStorageMetadata", &[("offsets", &sizes(0)), ("sizes", &sizes(2))]);
    let dtype = [&b"(ctorch\nfloat32\n"[..], b"t"].concat();
    let class = format!("c{CLASSES}\nTensorProperties\n");
    let properties = [class.as_bytes(), b")\x81", &dtype, b"b"].concat();
    let chunks = [&b"]("[..], &chunk, b"e"].concat();
    let fields = [("properties", &properties[..]), ("size", &sizes(2)), ("chunks", &chunks)];
    let all = [b"}(X\x01\0\0\0t", &object("TensorStorageMetadata", &fields)[..], b"u"].concat();
    let index = object("MetadataIndex", &[("fqn", b"X\x01\0\0\0t"), ("offset", &sizes(0))]);
    let len = [&b"J"[..], &u32::try_from(len).unwrap().to_le_bytes()].concat();
    let fields = [("relative_path", &b"X\x01\0\0\0f"[..]), ("offset", b"K\0"), ("length", &len)];
    let place = object_of(STORAGE, "_StorageInfo", &fields);
    let places = [&b"}("[..], &index, &place, b"u"].concat();
    let metadata = object("Metadata", &[("state_dict_metadata", &all), ("storage_data", &places)]);
    read(&[&b"\x80\x02"[..], &metadata, b"."].concat()).unwrap()
}

#[test]
fn a_part_has_one_tensor_and_is_reserved_before_it_is_kept() {
    let layout = |body: &[u8], most: u64| {
        let file = torch::tests::torch_file(body, &[&[7; 8]], false);
        let mut reserved = 0;
        let mut reserve = |bytes| {
            reserved += bytes;
            reserved <= most
        };
        let layout = one_part(file.len()).layout("f", &mut in_memory(&file), file.len() as u64, &mut reserve);
        (layout, reserved)
    };
    let tensor = torch::tests::view(b'0', 2, 0, &[2], &[1]);
    let (whole, needed) = layout(&tensor, u64::MAX);
    assert!(whole.unwrap().tensors.len() == 1 && needed > 100);
    let several = [&b"]("[..], &tensor, b"q\0h\0e"].concat();
    let (refused, _) = layout(&several, u64::MAX);
    assert!(matches!(refused, Err(ParseError::Mismatch { .. })), "{refused:?}");
    let (refused, _) = layout(&tensor, needed - 1);
    let is_memory = matches!(&refused, Err(ParseError::Item { source: torch::ParseError::Memory, .. }));
    assert!(is_memory, "{refused:?}");
}
