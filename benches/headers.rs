//! Finding the tensors of a large checkpoint from its headers alone: 100,000 tensors in a safetensors file, and DCP metadata of
//! 256 ranks, with as many tensors or with 3,600 that each have a part on every rank. On one core; the first look of each
//! also tells how much memory it took.

#![expect(clippy::print_stdout, reason = "criterion has no place for memory")]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use towline::checkpoint::{dcp, safetensors};

const RANKS: usize = 256;
const COLUMNS: u64 = 4096;
const ROWS: u64 = 8192;

fn tensor_name(number: usize) -> String {
    format!("model.layers.{}.module_{}.weight", number / 12, number % 12)
}

/// A header of bf16 tensors, and the length of its file.
fn safetensors_header(tensors: u64) -> (Vec<u8>, u64) {
    let mut json = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
    let bytes = ROWS * COLUMNS * 2;
    for tensor in 0..tensors {
        let (name, start) = (tensor_name(usize::try_from(tensor).unwrap_or_default()), tensor * bytes);
        let end = start + bytes;
        let _ = write!(
            json,
            ",\"{name}\":{{\"dtype\":\"BF16\",\"shape\":[{ROWS},{COLUMNS}],\"data_offsets\":[{start},{end}]}}"
        );
    }
    json.push('}');
    let header = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
    let len = header.len() as u64 + tensors * bytes;
    (header, len)
}

/// Writes what Python's pickler does, protocol 4: whatever may come again is remembered, and then only named by number.
#[derive(Default)]
struct Pickler {
    out: Vec<u8>,
    remembered: u32,
    texts: HashMap<String, u32>,
    globals: HashMap<(&'static str, &'static str), u32>,
}

impl Pickler {
    fn op(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    fn remember(&mut self) -> u32 {
        self.op(&[0x94]);
        self.remembered += 1;
        self.remembered - 1
    }

    fn recall(&mut self, number: u32) {
        match u8::try_from(number) {
            Ok(short) => self.op(&[b'h', short]),
            Err(_) => {
                self.op(b"j");
                self.op(&number.to_le_bytes());
            }
        }
    }

    fn text(&mut self, text: &str) {
        if let Some(&known) = self.texts.get(text) {
            return self.recall(known);
        }
        self.op(&[0x8c, u8::try_from(text.len()).unwrap_or(u8::MAX)]);
        self.op(text.as_bytes());
        let number = self.remember();
        self.texts.insert(text.to_owned(), number);
    }

    fn global(&mut self, module: &'static str, name: &'static str) {
        if let Some(&known) = self.globals.get(&(module, name)) {
            return self.recall(known);
        }
        self.text(module);
        self.text(name);
        self.op(&[0x93]);
        let number = self.remember();
        self.globals.insert((module, name), number);
    }

    fn number(&mut self, number: u64) {
        match (u8::try_from(number), u16::try_from(number), i32::try_from(number)) {
            (Ok(number), ..) => self.op(&[b'K', number]),
            (_, Ok(number), _) => {
                self.op(b"M");
                self.op(&number.to_le_bytes());
            }
            (.., Ok(number)) => {
                self.op(b"J");
                self.op(&number.to_le_bytes());
            }
            _ => {
                self.op(&[0x8a, 8]);
                self.op(&number.to_le_bytes());
            }
        }
    }

    /// An object of a class whose state is a dict, or, of a frozen one with slots, `(None, dict)`.
    fn object(&mut self, module: &'static str, name: &'static str, fields: impl FnOnce(&mut Self)) {
        self.global(module, name);
        self.op(b")\x81");
        self.remember();
        self.op(b"}");
        self.remember();
        self.op(b"(");
        fields(self);
        self.op(b"ub");
    }

    fn size(&mut self, size: [u64; 2]) {
        self.global("torch", "Size");
        size.into_iter().for_each(|dim| self.number(dim));
        self.op(&[0x86]);
        self.remember();
        self.op(&[0x85]);
        self.remember();
        self.op(b"R");
        self.remember();
    }

    fn called(&mut self, global: [&'static str; 2], argument: impl FnOnce(&mut Self)) {
        self.global(global[0], global[1]);
        argument(self);
        self.op(&[0x85]);
        self.remember();
        self.op(b"R");
        self.remember();
    }
}

const CLASSES: &str = "torch.distributed.checkpoint.metadata";
const STORAGE: &str = "torch.distributed.checkpoint.filesystem";

/// Metadata as torch's `FileSystemWriter` writes it, of tensors that each have `parts` parts.
fn dcp_metadata(tensors: usize, parts: usize) -> Vec<u8> {
    let mut pickler = Pickler::default();
    pickler.op(&[0x80, 4]);
    pickler.object(CLASSES, "Metadata", |pickler| {
        pickler.text("state_dict_metadata");
        pickler.op(b"}");
        pickler.remember();
        for tensor in 0..tensors {
            pickler.op(b"(");
            described(pickler, tensor, parts);
            pickler.op(b"u");
        }
        pickler.text("planner_data");
        pickler.op(b"N");
        pickler.text("storage_data");
        pickler.op(b"}");
        pickler.remember();
        for item in 0..tensors * parts {
            pickler.op(b"(");
            stored(pickler, item / parts, item % parts, parts);
            pickler.op(b"u");
        }
    });
    pickler.op(b".");
    pickler.out
}

fn box_of(part: usize, parts: usize) -> [[u64; 2]; 2] {
    let rows = ROWS / parts as u64;
    [[part as u64 * rows, 0], [rows, COLUMNS]]
}

fn described(pickler: &mut Pickler, tensor: usize, parts: usize) {
    pickler.text(&tensor_name(tensor));
    pickler.object(CLASSES, "TensorStorageMetadata", |pickler| {
        pickler.text("properties");
        pickler.global(CLASSES, "TensorProperties");
        pickler.op(b")\x81");
        pickler.remember();
        pickler.op(b"(");
        pickler.global("torch", "float32");
        pickler.called(["torch.serialization", "_get_layout"], |pickler| pickler.text("torch.strided"));
        pickler.op(&[0x89]);
        pickler.called([CLASSES, "_MEM_FORMAT_ENCODING"], |pickler| pickler.number(0));
        pickler.op(&[0x89]);
        pickler.op(b"Nt");
        pickler.remember();
        pickler.op(b"b");
        pickler.text("size");
        pickler.size([ROWS, COLUMNS]);
        pickler.text("chunks");
        pickler.op(b"]");
        pickler.remember();
        pickler.op(b"(");
        for part in 0..parts {
            let [offsets, sizes] = box_of(part, parts);
            pickler.object(CLASSES, "ChunkStorageMetadata", |pickler| {
                pickler.text("offsets");
                pickler.size(offsets);
                pickler.text("sizes");
                pickler.size(sizes);
            });
        }
        pickler.op(b"e");
    });
}

fn stored(pickler: &mut Pickler, tensor: usize, part: usize, parts: usize) {
    pickler.object(CLASSES, "MetadataIndex", |pickler| {
        pickler.text("fqn");
        pickler.text(&tensor_name(tensor));
        pickler.text("offset");
        pickler.size(box_of(part, parts)[0]);
        pickler.text("index");
        pickler.number(part as u64);
    });
    pickler.object(STORAGE, "_StorageInfo", |pickler| {
        pickler.text("relative_path");
        pickler.text(&format!("__{}_0.distcp", (tensor * parts + part) % RANKS));
        pickler.text("offset");
        pickler.number(tensor as u64 * 600_000_000);
        pickler.text("length");
        pickler.number(500_000_000);
        pickler.text("transform_descriptors");
        pickler.op(b"N");
    });
}

/// The most memory that this process has held, in MiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or_default() >> 10
}

fn bench(criterion: &mut Criterion, name: &str, input: &[u8], find: impl Fn(&[u8]) -> usize) {
    let mut group = criterion.benchmark_group("headers");
    group.sample_size(10);
    let before = peak();
    let begun = Instant::now();
    let found = find(input);
    println!(
        "{name}: {found} found in {} MB of header, the first time in {:.2} s and {} MiB on top of {before}",
        input.len() / 1_000_000,
        begun.elapsed().as_secs_f64(),
        peak() - before,
    );
    group.bench_function(name, |bencher| bencher.iter(|| find(black_box(input))));
    group.finish();
}

fn headers(criterion: &mut Criterion) {
    // The smallest first: what one took of the allocator is there for the next.
    let (header, len) = safetensors_header(100_000);
    let parse = |header: &[u8]| safetensors::parse(header, len).map_or(0, |layout| layout.tensors.len());
    bench(criterion, "safetensors, 100,000 tensors", &header, parse);
    let parse = |metadata: &[u8]| dcp::parse(metadata, &mut |_| true).map_or(0, |metadata| metadata.files().count());
    bench(criterion, "DCP, 100,000 tensors in one part each", &dcp_metadata(100_000, 1), parse);
    bench(criterion, "DCP, 3,600 tensors in 256 parts each", &dcp_metadata(3600, RANKS), parse);
}

criterion_group!(benches, headers);
criterion_main!(benches);
