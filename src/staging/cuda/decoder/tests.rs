//! The kernels as they are shipped, interpreted, against the codec and BLAKE3 of the CPU.

use proptest::prelude::*;

use super::*;
use crate::codec::planes::{self, Element, Outline, Width};
use crate::id::ChunkId;
use crate::staging::ring::ChunkTarget;

#[path = "../../../../tests/cuda/ptx.rs"]
mod ptx;

/// Memory of a GPU: ranges, of which nothing but their bytes may be used.
#[derive(Default)]
struct Ranges(Vec<(u64, Vec<u8>)>);

impl Ranges {
    /// Adds memory of `len` bytes; returns its address.
    fn allocate(&mut self, len: usize) -> u64 {
        let address = (self.0.len() as u64 + 1) << 32;
        self.0.push((address, vec![0xa5; len]));
        address
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        ptx::Memory::bytes(self, address, bytes.len()).copy_from_slice(bytes);
    }
}

impl ptx::Memory for Ranges {
    fn bytes(&mut self, address: u64, len: usize) -> &mut [u8] {
        let found = self.0.iter_mut().find_map(|(start, memory)| {
            let offset = usize::try_from(address.checked_sub(*start)?).ok()?;
            memory.get_mut(offset..offset.checked_add(len)?)
        });
        found.unwrap_or_else(|| panic!("{len} bytes at {address:#x} are used, which no job has"))
    }
}

/// Runs all kernels for one chunk whose target is `shift` bytes after an aligned address; returns what is there, and the mismatches.
fn run(frame: Option<(&[u8], Outline)>, plain: &[u8], id: ChunkId, shift: usize) -> (Vec<u8>, u32) {
    let module = ptx::Module::parse(include_str!("kernels.ptx")).unwrap();
    let mut memory = Ranges::default();
    let words = |len: usize| len.next_multiple_of(4);
    let (bytes, planes) = frame.unzip();
    let is_encoded = planes.is_some();
    let scratch = scratch_len(plain.len(), is_encoded);
    let (table, mismatches) = (memory.allocate(Job::LEN), memory.allocate(4));
    let frame_at = memory.allocate(words(bytes.unwrap_or_default().len() + 1));
    let (target, free) = (memory.allocate(shift + plain.len()), memory.allocate(scratch));
    let to = target + shift as u64;
    memory.write(mismatches, &[0; 4]);
    match bytes {
        // Frames lie anywhere.
        Some(bytes) => memory.write(frame_at + 1, bytes),
        None => memory.write(to, plain),
    }
    let plain_len = u32::try_from(plain.len()).unwrap();
    let chunk = ChunkTarget { to, plain_len, id, planes };
    let job = Job::of(&chunk, frame_at + 1, &mut ScratchMemory { free, left: scratch }).unwrap();
    memory.write(table, &job.to_bytes());
    let mut launch = |name: &str, blocks: [u32; 2], threads, arguments: &[u64]| {
        let grid = ptx::Grid { blocks, threads };
        for block in (0..blocks[1]).flat_map(|y| (0..blocks[0]).map(move |x| [x, y])) {
            module.kernels[name].run_block(grid, block, arguments, &mut memory);
        }
    };
    if job.has_codes() {
        launch("unpack", [1, PLANE_BLOCKS], CODE_THREADS, &[table, mismatches]);
    }
    if is_encoded {
        launch("merge", [MERGE_BLOCKS, 1], THREADS, &[table]);
    }
    launch("leaves", [plain_len.div_ceil(LEAF).div_ceil(THREADS), 1], THREADS, &[table]);
    launch("roots", [1, 1], THREADS, &[table, mismatches]);
    let found = ptx::Memory::bytes(&mut memory, to, plain.len()).to_vec();
    let count = ptx::Memory::bytes(&mut memory, mismatches, 4).try_into().unwrap();
    (found, u32::from_le_bytes(count))
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// Numbers whose most significant byte takes few values, most of them seldom, and `constant` more bytes only one.
fn numbers(seed: u64, len: usize, width: Width, constant: usize) -> Vec<u8> {
    let mut bytes = noise(seed, len);
    let width = width.bytes();
    for number in bytes.chunks_exact_mut(width) {
        let top = number[width - 1];
        number[width - 1] = 0x38 + u8::try_from(top.leading_zeros()).unwrap() * 2;
        number[(width - 1).saturating_sub(constant)..width - 1].fill(7);
    }
    bytes
}

fn encoded(plain: &[u8], element: Element) -> Option<(Vec<u8>, Outline)> {
    let frame = planes::encode(plain, element, usize::MAX)?;
    let outline = Outline::of(&frame, plain.len())?;
    Some((frame, outline))
}

const WIDTHS: [Width; 4] = [Width::W1, Width::W2, Width::W4, Width::W8];

#[test]
fn raw_chunks_of_all_shapes_are_verified() {
    for len in [1, 63, 64, 65, 1023, 1024, 1025, 2048, 3072, 4097, 31 * 1024 + 7, 130 * 1024] {
        let plain = noise(len as u64, len);
        let shift = len % 4;
        assert_eq!(run(None, &plain, ChunkId::of(&plain), shift), (plain.clone(), 0), "{len} bytes");
        assert_eq!(run(None, &plain, ChunkId::of(b"other"), shift).1, 1, "{len} bytes");
    }
}

#[test]
fn encoded_chunks_are_decoded() {
    let mut coded = 0;
    for (seed, width) in (0..).zip(WIDTHS) {
        for (len, constant, shift) in [(40_000, 0, 0), (9_001, 1, 1), (4_003, 0, 2), (70_002, 2, 3)] {
            let plain = numbers(seed, len, width, constant);
            for element in [Element::Float(width), Element::Integer(width)] {
                let Some((frame, outline)) = encoded(&plain, element) else { continue };
                coded += usize::from(outline.planes.iter().any(|(how, _)| *how == planes::Encoding::Huffman));
                let found = run(Some((&frame, outline)), &plain, ChunkId::of(&plain), shift);
                assert!(found == (plain.clone(), 0), "{element:?}, {len} bytes: {} mismatches", found.1);
            }
        }
    }
    assert!(coded >= 24, "{coded} chunks have Huffman codes");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever a frame says, only its own memory is used, and what is not the chunk is counted.
    #[test]
    fn damaged_frames_harm_nothing_and_are_found(
        seed in any::<u64>(),
        log in 0usize..4,
        len in 600usize..6000,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..4),
        in_header in any::<bool>(),
    ) {
        let width = WIDTHS[log];
        let plain = numbers(seed, len, width, log % 2);
        let Some((mut frame, _)) = encoded(&plain, Element::Float(width)) else { return Ok(()) };
        let end = if in_header { frame.len().min(300) } else { frame.len() };
        for (place, change) in changes {
            frame[place.index(end)] ^= change;
        }
        let Some(outline) = Outline::of(&frame, plain.len()) else { return Ok(()) };
        let (found, mismatches) = run(Some((&frame, outline)), &plain, ChunkId::of(&plain), 1);
        prop_assert_eq!(mismatches > 0, found != plain);
        let mut decoded = vec![0; plain.len()];
        if planes::decode(&frame, &mut decoded).is_some() {
            prop_assert_eq!(found, decoded);
        }
    }
}
