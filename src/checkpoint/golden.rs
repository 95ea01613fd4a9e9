//! Tests that read checkpoints written by torch and safetensors (tests/golden/checkpoints).

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::*;
use crate::chunker::tensor;

/// Expectations of make.py about a file or folder.
#[derive(Deserialize)]
struct Expected {
    file: String,
    /// None for plain bytes.
    tensors: Option<Vec<Described>>,
}

#[derive(Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
struct Described {
    name: String,
    offsets: Option<Vec<u64>>,
    dtype: String,
    shape: Vec<u64>,
    whole: Option<Vec<u64>>,
    blake3: String,
}

pub(super) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoints")
}

fn expected() -> Vec<Expected> {
    serde_json::from_slice(&fs::read(folder().join("expected.json")).unwrap()).unwrap()
}

fn described(tensor: &Tensor, bytes: &[u8]) -> Described {
    let bytes = &bytes[usize::try_from(tensor.start).unwrap()..usize::try_from(tensor.end).unwrap()];
    Described {
        name: tensor.name.clone(),
        dtype: tensor.dtype.word().to_owned(),
        shape: tensor.shape.to_vec(),
        blake3: blake3::hash(bytes).to_string(),
        whole: tensor.part.as_ref().map(|part| part.shape.to_vec()),
        offsets: tensor.part.as_ref().map(|part| part.offsets.to_vec()),
    }
}

/// Checks what every layout promises: order, bounds, and spans that cut the whole file.
pub(super) fn check(layout: &Layout, len: u64) {
    assert!(layout.tensors.iter().all(|tensor| tensor.start <= tensor.end && tensor.end <= len));
    assert!(layout.tensors.is_sorted_by_key(|tensor| tensor.start));
    let (mut end, spans) = (0, layout.spans());
    for span in &spans {
        assert!(end <= span.start && span.start < span.end && span.end <= len, "{span:?}");
        end = span.end;
    }
    assert_eq!(tensor::cuts(&spans, len).last(), (len > 0).then_some(len));
}

/// The bytes and the type of each stretch that no tensor touches.
pub(super) fn nameless(layout: &Layout) -> Vec<(u64, &str)> {
    let alone =
        |one: &&Elements| layout.tensors.iter().all(|tensor| tensor.end <= one.start || tensor.start >= one.end);
    layout.elements.iter().filter(alone).map(|one| (one.end - one.start, one.dtype.word())).collect()
}

#[test]
fn files_hold_what_their_writers_put_in() {
    for Expected { file, tensors } in expected().into_iter().filter(|one| one.file != "dcp") {
        let bytes = fs::read(folder().join(&file)).unwrap();
        let layout = parse_layout(&mut in_memory(&bytes), bytes.len() as u64, &mut |_| true).unwrap();
        let Some(mut wanted) = tensors else {
            assert_eq!(layout, None, "{file}");
            continue;
        };
        let layout = layout.unwrap();
        check(&layout, bytes.len() as u64);
        let mut found: Vec<_> = layout.tensors.iter().map(|tensor| described(tensor, &bytes)).collect();
        wanted.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, wanted, "{file}");
    }
}

#[test]
fn distributed_parts_know_their_wholes() {
    let wanted = expected().into_iter().find(|one| one.file == "dcp").unwrap();
    let metadata = dcp::parse(&fs::read(folder().join("dcp/.metadata")).unwrap(), &mut |_| true).unwrap();
    let mut found = Vec::new();
    for file in metadata.files() {
        let bytes = fs::read(folder().join("dcp").join(file)).unwrap();
        let layout = metadata.layout(file, &mut in_memory(&bytes), bytes.len() as u64, &mut |_| true).unwrap();
        check(&layout, bytes.len() as u64);
        found.extend(layout.tensors.iter().map(|tensor| described(tensor, &bytes)));
        assert!(
            metadata.layout(file, &mut in_memory(&bytes), bytes.len() as u64 - 1, &mut |_| true).is_err(),
            "cut short"
        );
    }
    let mut wanted = wanted.tensors.unwrap();
    wanted.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, wanted);
}

/// Elements that are not row-major have no name, yet are cut at their bounds.
#[test]
fn storages_without_a_listed_tensor_are_elements() {
    let bytes = fs::read(folder().join("views.pt")).unwrap();
    let layout = torch::parse(&mut in_memory(&bytes), bytes.len() as u64, &mut |_| true).unwrap();
    // transposed, expanded, last: 15, 4 and 24 fp32; `column` lies within what is tied.
    assert_eq!(nameless(&layout), [(60, "F32"), (16, "F32"), (96, "F32")]);
}

/// Whatever is done to a byte: an answer, and a sound one.
#[test]
fn damage_to_any_byte_is_read_or_refused() {
    for file in ["views.pt", "objects.pth", "alone.pt"] {
        let whole = fs::read(folder().join(file)).unwrap();
        let len = whole.len() as u64;
        for at in 0..whole.len() {
            for byte in [whole[at] ^ 1, whole[at] ^ 0x80, 0xff, b'R', b'(', 0x94] {
                let mut bytes = whole.clone();
                bytes[at] = byte;
                if let Ok(layout) = torch::parse(&mut in_memory(&bytes), len, &mut |_| true) {
                    check(&layout, len);
                }
            }
            let cut = at as u64;
            assert!(torch::parse(&mut in_memory(&whole[..at]), cut, &mut |_| true).is_err(), "{file} cut at {at}");
        }
    }
    let whole = fs::read(folder().join("dcp/.metadata")).unwrap();
    let parts = fs::read(folder().join("dcp/__0_0.distcp")).unwrap();
    for at in 0..whole.len() {
        for byte in [whole[at] ^ 1, 0xff, b'K', 0x94] {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            let Ok(metadata) = dcp::parse(&bytes, &mut |_| true) else { continue };
            if let Ok(layout) =
                metadata.layout("__0_0.distcp", &mut in_memory(&parts), parts.len() as u64, &mut |_| true)
            {
                check(&layout, parts.len() as u64);
            }
        }
        assert!(dcp::parse(&whole[..at], &mut |_| true).is_err(), "{at}");
    }
}
