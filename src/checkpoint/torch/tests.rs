//! Archives made by hand: what torch would not write, and what a hostile writer would.

use super::*;
use crate::checkpoint::golden::nameless;
use crate::checkpoint::{Dtype, in_memory};

/// One record: name, bytes, and whether it claims to be compressed.
type Record<'a> = (&'a str, &'a [u8], bool);

/// An archive as torch lays it out, with zip64 records if asked for.
fn archive(records: &[Record<'_>], wide: bool) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes, compressed) in records {
        let (at, len) = (file.len() as u64, bytes.len() as u64);
        let method = [u8::from(*compressed) * 8, 0];
        let narrow = |number: u64| if wide { u32::MAX } else { u32::try_from(number).unwrap() }.to_le_bytes();
        let name_len = u16::try_from(name.len()).unwrap().to_le_bytes();
        // Padding in the local header, as torch aligns records.
        file.extend(
            [b"PK\x03\x04\0\0\0\0", &method[..], &[0; 16], &name_len, &[5, 0], name.as_bytes(), b"FB\x01\0Z", bytes]
                .concat(),
        );
        let extra = if wide {
            [&b"\x01\0\x18\0"[..], &len.to_le_bytes(), &len.to_le_bytes(), &at.to_le_bytes()].concat()
        } else {
            Vec::new()
        };
        let extra_len = u16::try_from(extra.len()).unwrap().to_le_bytes();
        let lens = [&narrow(len)[..], &narrow(len), &name_len, &extra_len, &[0; 10], &narrow(at)].concat();
        directory.extend([b"PK\x01\x02\0\0\0\0\0\0", &method[..], &[0; 8], &lens, name.as_bytes(), &extra].concat());
    }
    let (start, size, count) = (file.len() as u64, directory.len() as u64, records.len() as u64);
    file.extend(directory);
    let end = file.len() as u64;
    if wide {
        let numbers = [count, count, size, start].map(u64::to_le_bytes).concat();
        file.extend([b"PK\x06\x06", &44_u64.to_le_bytes()[..], &[0; 12], &numbers].concat());
        file.extend([b"PK\x06\x07", &[0; 4][..], &end.to_le_bytes(), &[1, 0, 0, 0]].concat());
    }
    let narrow = |number: u64| if wide { u32::MAX } else { u32::try_from(number).unwrap() }.to_le_bytes();
    let count = if wide { u16::MAX } else { u16::try_from(count).unwrap() }.to_le_bytes();
    file.extend([b"PK\x05\x06\0\0\0\0", &count[..], &count, &narrow(size), &narrow(start), &[0, 0]].concat());
    file
}

/// The pickle of `_rebuild_tensor_v2` of fp32 over the storage `key` of `elements`.
pub(in crate::checkpoint) fn view(key: u8, elements: u8, offset: u8, shape: &[u8], strides: &[u8]) -> Vec<u8> {
    let tuple =
        |numbers: &[u8]| [&b"("[..], &numbers.iter().flat_map(|&n| [b'K', n]).collect::<Vec<_>>(), b"t"].concat();
    let storage =
        [b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0", &[key][..], b"X\x03\0\0\0cpuK", &[elements], b"tQ"]
            .concat();
    [
        &b"ctorch._utils\n_rebuild_tensor_v2\n("[..],
        &storage,
        &[b'K', offset],
        &tuple(shape),
        &tuple(strides),
        b"\x89NtR",
    ]
    .concat()
}

/// A file whose pickle is `body` and whose storages `0`, `1`, .. are `storages`.
pub(in crate::checkpoint) fn torch_file(body: &[u8], storages: &[&[u8]], wide: bool) -> Vec<u8> {
    let pickle = [b"\x80\x02", body, b"."].concat();
    let names: Vec<String> = (0..storages.len()).map(|nth| format!("x/data/{nth}")).collect();
    let mut records: Vec<Record<'_>> = vec![("x/data.pkl", &pickle, false), ("x/byteorder", b"little", false)];
    records.extend(names.iter().zip(storages).map(|(name, bytes)| (name.as_str(), *bytes, false)));
    archive(&records, wide)
}

fn read(file: &[u8]) -> Result<Layout, ParseError> {
    parse(&mut in_memory(file), file.len() as u64, &mut |_| true)
}

#[test]
fn wide_archives_are_read_as_narrow_ones() {
    for wide in [false, true] {
        let file = torch_file(&view(b'0', 6, 1, &[2, 2], &[2, 1]), &[&[7; 24]], wide);
        let layout = read(&file).unwrap();
        let [tensor] = layout.tensors.as_slice() else { panic!("{layout:?}") };
        assert_eq!((tensor.name.as_str(), &tensor.dtype, &*tensor.shape), (ROOT_NAME, &Dtype::F32, &[2, 2][..]));
        assert_eq!(file[usize::try_from(tensor.start).unwrap() - 4..usize::try_from(tensor.end).unwrap() + 4], [7; 24]);
        // Before and after it, the storage's elements without a name.
        assert_eq!(nameless(&layout), [(4, "F32"), (4, "F32")]);
        for cut in 0..file.len() {
            assert!(read(&file[..cut]).is_err(), "{cut}");
        }
    }
}

#[test]
fn other_archives_are_not_torch_files() {
    let empty = archive(&[], false);
    let two = archive(&[("x/data.pkl", b"\x80\x02N.", false), ("y/data.pkl", b"\x80\x02N.", false)], false);
    let deeper = archive(&[("x/y/data.pkl", b"\x80\x02N.", false)], false);
    for file in [&b"PK\x03\x04"[..], &empty, &two, &deeper, &archive(&[("a.txt", b"text", true)], false)] {
        assert!(matches!(read(file), Err(ParseError::NotTorch)), "{file:?}");
    }
}

#[test]
fn lies_are_refused_each_for_its_reason() {
    let whole = view(b'0', 6, 0, &[2, 3], &[3, 1]);
    let refused = |body: &[u8], storages: &[&[u8]]| read(&torch_file(body, storages, false)).unwrap_err();
    assert!(matches!(refused(&whole, &[]), ParseError::Storage { what: "has no record", .. }));
    assert!(matches!(refused(&whole, &[&[0; 23]]), ParseError::Storage { what: "is longer than its record", .. }));
    assert!(matches!(refused(&view(b'0', 6, 1, &[2, 3], &[3, 1]), &[&[0; 24]]), ParseError::OutOfRange { .. }));
    let twice = [b"(", &whole[..], &view(b'0', 5, 0, &[1], &[1]), b"t"].concat();
    assert!(matches!(refused(&twice, &[&[0; 24]]), ParseError::Storage { what: "is described in two ways", .. }));

    let pickle = b"\x80\x02N.";
    let big = archive(&[("x/data.pkl", pickle, false), ("x/byteorder", b"big", false)], false);
    assert!(matches!(read(&big), Err(ParseError::BigEndian)));
    let packed = archive(&[("x/data.pkl", pickle, true)], false);
    assert!(matches!(read(&packed), Err(ParseError::Zip { what: "an entry is compressed or encrypted", .. })));
    let same = archive(&[("x/data.pkl", pickle, false), ("x/data.pkl", pickle, false)], false);
    assert!(matches!(read(&same), Err(ParseError::Zip { what: "two entries have one name", .. })));
    // Two directory entries with one header between them.
    let mut file =
        torch_file(&[b"(", &whole[..], &view(b'1', 6, 0, &[6], &[1]), b"t"].concat(), &[&[1; 24], &[2; 24]], false);
    let starts: Vec<usize> = (0..file.len()).filter(|&at| file[at..].starts_with(b"PK\x01\x02")).collect();
    let first: Vec<u8> = file[starts[2] + 42..starts[2] + 46].to_vec();
    file[starts[3] + 42..starts[3] + 46].copy_from_slice(&first);
    assert!(matches!(read(&file), Err(ParseError::Zip { what: "an entry's own header says otherwise", .. })));
    // A record within another, header and all.
    let both = [b"(", &whole[..], &view(b'1', 1, 0, &[1], &[1]), b"t"].concat();
    let inner = [b"PK\x03\x04", &[0; 22][..], b"\x0a\0\0\0x/data/1", &[9; 4]].concat();
    let mut file = torch_file(&both, &[&inner, &[9; 4]], false);
    let inner_at = file.windows(inner.len()).position(|at| at == inner).unwrap();
    let last = (0..file.len()).rfind(|&at| file[at..].starts_with(b"PK\x01\x02")).unwrap();
    let name_len = file[last + 28];
    assert_eq!(name_len, 8);
    file[inner_at + 26] = name_len;
    file[last + 42..last + 46].copy_from_slice(&u32::try_from(inner_at).unwrap().to_le_bytes());
    assert!(matches!(read(&file), Err(ParseError::Storage { what: "overlaps another", .. })));
    // A directory that counts more than it holds.
    let mut file = torch_file(&whole, &[&[0; 24]], false);
    let at = file.len() - 12;
    file[at..at + 2].copy_from_slice(&[0xff, 0xfe]);
    assert!(matches!(read(&file), Err(ParseError::Zip { .. })));
}

#[test]
fn tensors_of_unknown_kinds_leave_their_storages_as_spans() {
    let mut unknown = view(b'0', 6, 0, &[6], &[1]);
    let class = unknown.windows(5).position(|word| word == b"Float").unwrap();
    unknown.splice(class..class + 5, *b"Quaternion");
    let layout = read(&torch_file(&unknown, &[&[0; 24]], false)).unwrap();
    assert_eq!((layout.tensors.len(), nameless(&layout)), (0, vec![(24, "")]));
    // Called by a function that nobody knows: the tensor within is found all the same.
    let wrapped = [b"cmy.module\nmake\nK\x05", &view(b'0', 6, 0, &[6], &[1])[..], b"\x86R"].concat();
    let layout = read(&torch_file(&wrapped, &[&[0; 24]], false)).unwrap();
    assert_eq!(layout.tensors[0].name, "1");
}

#[test]
fn doubling_cycles_and_depth_are_bounded() {
    let tensor = view(b'0', 6, 0, &[6], &[1]);
    // 2^64 paths to one tensor: it has the names of the ways by which each container is first met.
    let doubling = [b"(", &tensor[..], b"l", &b"2\x86".repeat(64)].concat();
    let layout = read(&torch_file(&doubling, &[&[0; 24]], false)).unwrap();
    assert_eq!(layout.tensors.len(), 1);
    // A list that holds itself.
    let cycle = [&b"]q\0(h\0"[..], &tensor, b"e"].concat();
    assert_eq!(read(&torch_file(&cycle, &[&[0; 24]], false)).unwrap().tensors[0].name, "1");
    let deep = [&tensor[..], &b"\x85".repeat(DEPTH_MAX as usize + 1)].concat();
    assert!(matches!(read(&torch_file(&deep, &[&[0; 24]], false)), Err(ParseError::TooDeep)));
    let names = [&b"(X"[..], &0x1_0001_u32.to_le_bytes(), &b"n".repeat(0x1_0001), &tensor, b"d"].concat();
    assert!(matches!(read(&torch_file(&names, &[&[0; 24]], false)), Err(ParseError::TooMany)));
    let many = [&b"(("[..], &tensor, b"q\x00", &b"h\x00".repeat(TENSORS_MAX), b"tt"].concat();
    assert!(matches!(read(&torch_file(&many, &[&[0; 24]], false)), Err(ParseError::TooMany)));
}

#[test]
fn paths_that_are_spelt_alike_name_one_tensor() {
    let tensor = view(b'0', 6, 0, &[6], &[1]);
    let body =
        [b"(X\x03\0\0\0a.b", &tensor[..], b"X\x01\0\0\0a(X\x01\0\0\0b", &view(b'1', 6, 0, &[6], &[1]), b"dd"].concat();
    let layout = read(&torch_file(&body, &[&[0; 24], &[1; 24]], false)).unwrap();
    assert_eq!(layout.tensors.len(), 1);
    assert_eq!((layout.tensors[0].name.as_str(), nameless(&layout)), ("a.b", vec![(24, "F32")]));
}

#[test]
fn what_is_listed_very_often_is_reserved_before_it_is_kept() {
    // A list of one remembered tensor of 64 dimensions, many times: two bytes each.
    let tensor = [view(b'0', 1, 0, &[1; 64], &[1; 64]), b"q\0".to_vec()].concat();
    let body = [&b"]("[..], &tensor, &b"h\0".repeat(50_000), b"e"].concat();
    let file = torch_file(&body, &[&[7; 4]], false);
    assert_eq!(read(&file).unwrap().tensors.len(), 50_001);
    let mut left = 1 << 20;
    let mut reserve = |bytes: u64| {
        left -= i64::try_from(bytes).unwrap();
        left >= 0
    };
    let refused = parse(&mut in_memory(&file), file.len() as u64, &mut reserve);
    assert!(matches!(refused, Err(ParseError::Memory)), "{refused:?}");
    assert!(left > -(65 << 10), "nothing was kept after the refusal: {left}");
}

#[test]
fn tensors_attached_to_tensors_at_any_depth_are_found_without_recursion() {
    // Each is the state of the one before: function and arguments from the memo, applied, and built with the next one.
    const DEPTH: usize = 200_000;
    let of = view(b'0', 1, 0, &[1], &[1]);
    // Without REDUCE: function and arguments.
    let (function, args) =
        (&b"ctorch._utils\n_rebuild_tensor_v2\n"[..], &of[b"ctorch._utils\n_rebuild_tensor_v2\n".len()..of.len() - 1]);
    let remembered = [function, b"q\0", args, b"q\x01R"].concat();
    let body = [&remembered[..], &b"h\0h\x01R".repeat(DEPTH), b"N", &b"b".repeat(DEPTH + 1)].concat();
    let file = torch_file(&body, &[&[7; 4]], false);
    let layout = read(&file).unwrap();
    // All have the same path, and so one name.
    assert_eq!(layout.tensors.len(), 1);
}

#[test]
fn many_references_to_a_parameter_with_many_arguments_take_no_time() {
    let data = view(b'0', 1, 0, &[1], &[1]);
    let junk = b"]".repeat(100_000);
    let parameter = [&b"ctorch._utils\n_rebuild_parameter\n("[..], &data, b"\x89N", &junk, b"tRq\0"].concat();
    let body = [&b"]("[..], &parameter, &b"h\0".repeat(100_000), b"e"].concat();
    assert_eq!(read(&torch_file(&body, &[&[7; 4]], false)).unwrap().tensors.len(), 100_001);
}

#[test]
fn many_references_to_a_long_text_take_no_time() {
    const LEN: u32 = 1_000_000;
    let long = [&b"X"[..], &LEN.to_le_bytes(), &b"t".repeat(LEN as usize), b"q\0"].concat();
    let references = b"h\0".repeat(LEN as usize);
    // As a member, a key, and the name of a class.
    let body = [&b"]("[..], &long, &references, b"e"].concat();
    assert_eq!(read(&torch_file(&body, &[], false)).unwrap().tensors.len(), 0);
    let body = [&b"}("[..], &long, b"N", &b"h\0]".repeat(LEN as usize / 2), b"u"].concat();
    assert_eq!(read(&torch_file(&body, &[], false)).unwrap().tensors.len(), 0);
    let class = [&long[..], &b"h\0\x93q\x01"[..]].concat();
    let body = [&b"]("[..], &class, &b"h\x01)\x81".repeat(LEN as usize / 4), b"e"].concat();
    assert_eq!(read(&torch_file(&body, &[], false)).unwrap().tensors.len(), 0);
    // As the key of a storage, which is looked for by its text.
    let storage = [&b"(X\x07\0\0\0storagectorch\nFloatStorage\n"[..], &long, b"X\x03\0\0\0cpuK\x01tQq\x01"].concat();
    let tensor = [&b"ctorch._utils\n_rebuild_tensor_v2\n("[..], &storage, b"K\0(K\x01t(K\x01t\x89Ntq\x02R"].concat();
    let again = b"ctorch._utils\n_rebuild_tensor_v2\nh\x02R".repeat(LEN as usize / 50);
    let body = [&b"]("[..], &tensor, &again, b"e"].concat();
    assert_eq!(read(&torch_file(&body, &[], false)).unwrap().tensors.len(), 0);
}
