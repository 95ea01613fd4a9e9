//! Tensors out of a saved tree: whole ones and boxes, from files and from parts of ranks; only the chunks that hold them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::TryStreamExt as _;
use object_store::ObjectStoreExt as _;
use tokio::sync::Notify;
use towline::checkpoint::boxes::{Shard, Slices};
use towline::codec::{Codec, Compression, rounded};
use towline::error::ErrorKind;
use towline::format::EntryKind;
use towline::metrics::Metric;
use towline::ops::{
    CollectOptions, RestoreTensorsOptions, SaveOptions, TensorReading, TensorSelector, TensorSink, TensorsRead,
};
use towline::progress::Progress;
use towline::repository::{Fill, OpenOptions, Repository};
use towline::storage::Store;
use towline::{Error, Result};

use crate::data::{name, noise};

struct Fixture {
    dir: tempfile::TempDir,
    store: Store,
    repository: Repository,
}

/// A tensor of a file: its name, type, shape and bytes.
type Plain<'a> = (&'a str, &'a str, &'a [u64], Vec<u8>);

/// One for each tensor of a reading. Every other of the chunks that fill a stretch is decoded there, the others are copied.
struct Buffers(Vec<Mutex<Vec<u8>>>);

impl TensorSink for Buffers {
    fn place(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let at = usize::try_from(offset).unwrap();
        self.0[tensor].lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn fill(&self, tensor: usize, offset: u64, len: usize, fill: Fill<'_>) -> Result<bool> {
        let at = usize::try_from(offset).unwrap();
        if at / len % 2 == 1 {
            return Ok(false);
        }
        fill(&mut self.0[tensor].lock().unwrap()[at..at + len])?;
        Ok(true)
    }
}

impl Fixture {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options =
            OpenOptions { cache: Some(dir.path().join("cache")), memory: Some(128 << 20), ..OpenOptions::default() };
        let store = Store::memory();
        let repository = Repository::create(store.clone(), options).await.unwrap().0;
        Self { dir, store, repository }
    }

    fn path(&self, below: &str) -> PathBuf {
        let path = self.dir.path().join(below);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    async fn save(&self, path: &Path, compression: Compression) {
        let options = SaveOptions { compression, ..SaveOptions::default() };
        self.repository.save(path, &name("n"), &options).await.unwrap();
    }

    /// Reads what `selectors` say, into buffers full of what was there before.
    async fn read(&self, selectors: &[&str]) -> Result<(Vec<(String, Vec<u8>)>, TensorsRead)> {
        let selectors: Vec<TensorSelector> = selectors.iter().map(|text| text.parse()).collect::<Result<_>>()?;
        self.carry_out(self.repository.choose_tensors(&name("n"), None, &selectors).await?).await
    }

    async fn carry_out(&self, reading: TensorReading) -> Result<(Vec<(String, Vec<u8>)>, TensorsRead)> {
        let reading = Arc::new(reading);
        let lens = reading.tensors().iter().map(|tensor| usize::try_from(tensor.bytes).unwrap());
        let buffers = Arc::new(Buffers(lens.map(|len| Mutex::new(vec![0xee; len])).collect()));
        let sink = Arc::clone(&buffers);
        let read = self.repository.read_tensors(&reading, sink, &Progress::default()).await?;
        let filled = buffers.0.iter().map(|buffer| std::mem::take(&mut *buffer.lock().unwrap()));
        Ok((reading.tensors().iter().map(|tensor| tensor.name.clone()).zip(filled).collect(), read))
    }

    async fn one(&self, selector: &str) -> Vec<u8> {
        let (mut found, _) = self.read(&[selector]).await.unwrap();
        assert_eq!(found.len(), 1, "{selector}");
        found.remove(0).1
    }

    async fn refused(&self, selector: &str) -> Error {
        self.read(&[selector]).await.map(drop).expect_err(selector)
    }

    /// The chunks that hold these rows of tensors, and their bases, each once: plain and stored bytes.
    async fn needed(&self, saved: &str, rows: &[(&str, std::ops::Range<u64>)]) -> Vec<(u64, u64)> {
        let saved = self.repository.saved(&name(saved)).await.unwrap();
        let mut chunks = BTreeSet::new();
        for entry in &saved.manifest.entries {
            let EntryKind::File(content) = &entry.kind else { continue };
            for (tensor, rows) in content.tensors.iter().filter_map(|one| Some((one, of(rows, &one.name)?))) {
                let row = (tensor.range.end - tensor.range.start) / tensor.shape[0];
                let wanted = tensor.range.start + rows.start * row..tensor.range.start + rows.end * row;
                let holds = |at: &std::ops::Range<u64>| at.start < wanted.end && wanted.start < at.end;
                chunks
                    .extend(content.placed(&saved.manifest.chunks).filter(|(_, at)| holds(at)).map(|(chunk, _)| chunk));
            }
        }
        for _ in 0..2 {
            let bases: Vec<u32> = chunks.iter().filter_map(|&chunk| saved.locate(chunk).unwrap().base).collect();
            chunks.extend(bases);
        }
        let place = |&chunk: &u32| saved.locate(chunk).unwrap().place;
        chunks.iter().map(place).map(|place| (place.plain_len.into(), place.stored_len.into())).collect()
    }

    fn gets(&self) -> (u64, u64) {
        let counters = self.store.counters();
        (counters.get(Metric::GetRequests), counters.get(Metric::GetBytes))
    }
}

/// Which rows of a tensor are meant.
fn of(rows: &[(&str, std::ops::Range<u64>)], name: &str) -> Option<std::ops::Range<u64>> {
    rows.iter().find(|(of, _)| *of == name).map(|(_, rows)| rows.clone())
}

/// A safetensors file.
fn file(tensors: &[Plain<'_>]) -> Vec<u8> {
    let (mut header, mut at) = (String::from("{"), 0);
    for (name, dtype, shape, bytes) in tensors {
        let (comma, end) = (if at == 0 { "" } else { "," }, at + bytes.len());
        write!(header, r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{end}]}}"#)
            .unwrap();
        at = end;
    }
    header.push('}');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    tensors.iter().for_each(|(.., bytes)| file.extend(bytes));
    file
}

/// Numpy's `whole[box]`, element by element.
fn sliced(whole: &[u8], shape: &[u64], ranges: &[std::ops::Range<u64>], element: u64) -> Vec<u8> {
    let mut starts = vec![0];
    for (len, range) in shape.iter().zip(ranges) {
        starts = starts.iter().flat_map(|at| range.clone().map(move |index| at * len + index)).collect();
    }
    let bytes = |at: u64| &whole[usize::try_from(at * element).unwrap()..usize::try_from((at + 1) * element).unwrap()];
    starts.into_iter().flat_map(|at| bytes(at).to_vec()).collect()
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoints")
}

/// What torch says that the golden files hold: of each file its tensors, as JSON.
fn expected() -> BTreeMap<String, Vec<serde_json::Value>> {
    let all: serde_json::Value = serde_json::from_slice(&fs::read(golden().join("expected.json")).unwrap()).unwrap();
    let tensors = |one: &serde_json::Value| one["tensors"].as_array().cloned().unwrap_or_default();
    all.as_array().unwrap().iter().map(|one| (one["file"].as_str().unwrap().to_owned(), tensors(one))).collect()
}

fn numbers(value: &serde_json::Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn tensors_that_torch_wrote_are_read_as_torch_has_them() {
    let fixture = Fixture::new().await;
    fixture.save(&golden(), Compression::Auto).await;
    let listed = fixture.repository.tensors(&name("n"), &[]).await.unwrap();
    let mut seen = 0;
    for (path, tensors) in expected().iter().filter(|(path, _)| *path != "dcp") {
        for tensor in tensors {
            let wanted = tensor["name"].as_str().unwrap();
            let bytes = fixture.one(&format!("{path}:{wanted}")).await;
            assert_eq!(blake3::hash(&bytes).to_string(), tensor["blake3"], "{path}:{wanted}");
            let one = listed.iter().find(|one| one.path == *path && one.name == wanted).unwrap();
            assert_eq!((&one.shape, one.bytes, one.parts), (&numbers(&tensor["shape"]), bytes.len() as u64, 1));
            assert_eq!(one.dtype, tensor["dtype"]);
            seen += 1;
        }
    }
    assert_eq!(seen + listed.iter().filter(|one| one.path == "dcp").count(), listed.len());
    assert!(seen > 40, "{seen}");
}

/// "DCP parts saved by N ranks are readable as whole tensors."
#[tokio::test(flavor = "multi_thread")]
async fn parts_of_ranks_are_one_tensor() {
    let fixture = Fixture::new().await;
    fixture.save(&golden(), Compression::Auto).await;
    let listed = fixture.repository.tensors(&name("n"), &["dcp:*".parse().unwrap()]).await.unwrap();
    let shown: Vec<_> = listed.iter().map(|one| (one.name.as_str(), one.shape.as_slice(), one.parts)).collect();
    let mut names: Vec<_> = shown.iter().map(|(name, ..)| *name).collect();
    names.sort_unstable();
    assert_eq!(names, ["columns", "empty", "rows", "same", "scalar", "uneven"].map(|name| format!("model.{name}")));
    assert!(shown.contains(&("model.columns", &[4, 6], 2)) && shown.contains(&("model.scalar", &[], 1)), "{shown:?}");
    assert!(listed.iter().all(|one| one.path == "dcp"));

    let (found, _) = fixture.read(&["dcp:*"]).await.unwrap();
    let wholes: BTreeMap<_, _> = found.into_iter().collect();
    for part in &expected()["dcp"] {
        let (tensor, shape, offsets) =
            (part["name"].as_str().unwrap(), numbers(&part["shape"]), numbers(&part["offsets"]));
        let ranges: Vec<_> = offsets.iter().zip(&shape).map(|(from, len)| *from..from + len).collect();
        let whole = &wholes[tensor];
        let element = whole.len() as u64 / numbers(&part["whole"]).iter().product::<u64>().max(1);
        let cut = sliced(whole, &numbers(&part["whole"]), &ranges, element);
        assert_eq!(blake3::hash(&cut).to_string(), part["blake3"], "{tensor} {ranges:?}");
        let bounds: Vec<String> = ranges.iter().map(|range| format!("{}:{}", range.start, range.end)).collect();
        let asked = if bounds.is_empty() { tensor.to_owned() } else { format!("{tensor}[{}]", bounds.join(",")) };
        assert!(fixture.one(&asked).await == cut, "{asked}");
    }
    // Boxes across the parts, and their shards.
    let (rows, columns) = (&wholes["model.rows"], &wholes["model.columns"]);
    assert_eq!(fixture.one("model.rows[2:5, 1:3]").await, sliced(rows, &[6, 4], &[2..5, 1..3], 4));
    assert_eq!(fixture.one("model.columns[1:, -4:5]").await, sliced(columns, &[4, 6], &[1..4, 2..5], 2));
    for (index, rows_of) in [(0, 0..2), (1, 2..4), (2, 4..5), (3, 5..5)] {
        let selector = TensorSelector::new("model.uneven").unwrap().shard(Shard::new(index, 4).unwrap());
        let reading = fixture.repository.choose_tensors(&name("n"), None, &[selector]).await.unwrap();
        let (found, _) = fixture.carry_out(reading).await.unwrap();
        assert_eq!(found[0].1, sliced(&wholes["model.uneven"], &[5, 3], &[rows_of, 0..3], 4), "{index}");
    }
}

/// T2: "Elements that no part holds are exit 3, with the missing box".
#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_saved_is_named() {
    let fixture = Fixture::new().await;
    for file in [".metadata", "__0_0.distcp"] {
        fs::copy(golden().join("dcp").join(file), fixture.path(&format!("dcp/{file}"))).unwrap();
    }
    fixture.save(&fixture.path("dcp"), Compression::Auto).await;
    let error = fixture.refused("model.rows").await;
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(
        error.to_string().contains("no part holds [3:6, 0:4]") && error.to_string().contains("model.rows"),
        "{error}"
    );
    assert_eq!(fixture.one("model.rows[1:3]").await.len(), 2 * 4 * 4);
    assert_eq!(fixture.refused("model.columns[0:1, 2:4]").await.kind(), ErrorKind::NotFound);

    let error = fixture.refused("model.row").await;
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.help_text().unwrap().contains("towline tensors n"), "{error:?}");
    for (selector, kind) in [
        ("elsewhere:model.rows", ErrorKind::NotFound),
        ("model.rows[0:7]", ErrorKind::Usage),
        ("model.rows[:, :, 0:1]", ErrorKind::Usage),
        ("model.*[:, :, :]", ErrorKind::Usage),
        ("model.rows[0]", ErrorKind::NotFound),
        ("model.{rows", ErrorKind::Usage),
        ("", ErrorKind::Usage),
        ("[0:3]", ErrorKind::Usage),
    ] {
        assert_eq!(fixture.refused(selector).await.kind(), kind, "{selector}");
    }
    let gone = fixture.repository.choose_tensors(&name("m"), None, &["*".parse().unwrap()]).await.unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}

/// Boxes of a tensor of many chunks, compressed or not, are what numpy cuts out of it.
#[tokio::test(flavor = "multi_thread")]
async fn boxes_are_what_numpy_cuts() {
    let shape = [64, 50, 300];
    let whole = noise(1, 64 * 50 * 300 * 4);
    let packed = noise(2, 33);
    for compression in [Compression::Off, Compression::Auto] {
        let fixture = Fixture::new().await;
        let (path, small) = (fixture.path("model.safetensors"), noise(3, 40));
        let tensors: [Plain<'_>; 4] = [
            ("small", "F16", &[4, 5], small.clone()),
            ("big", "F32", &shape, whole.clone()),
            ("packed", "F4", &[11, 6], packed.clone()),
            ("strange", "Q7", &[3, 3], packed.clone()),
        ];
        fs::write(&path, file(&tensors)).unwrap();
        fixture.save(&path, compression).await;
        for ranges in [
            [0..64, 0..50, 0..300],
            [0..8, 0..50, 0..300],
            [63..64, 0..50, 0..300],
            [0..64, 7..9, 0..300],
            [3..61, 49..50, 17..18],
            [0..64, 0..50, 299..300],
            [10..11, 20..21, 30..31],
            [5..5, 0..50, 0..300],
        ] {
            let slices = Slices::of(ranges.clone());
            let (found, read) = fixture.read(&[&format!("big{slices}")]).await.unwrap();
            assert!(found[0].1 == sliced(&whole, &shape, &ranges, 4), "{slices}");
            assert_eq!(read.bytes, found[0].1.len() as u64);
        }
        assert_eq!(fixture.one("small[:, 1:3]").await, sliced(&small, &[4, 5], &[0..4, 1..3], 2));
        assert_eq!((fixture.one("packed").await, fixture.one("str*").await), (packed.clone(), packed.clone()));
        for selector in ["packed[0:2]", "strange[0:1]"] {
            assert_eq!(fixture.refused(selector).await.kind(), ErrorKind::Unsupported, "{selector}");
        }
        // Whatever is asked for twice comes once.
        let (found, _) = fixture.read(&["small", "*all", "small[0:4]", "small[0:1]"]).await.unwrap();
        assert_eq!(found.len(), 2);
    }
}

/// What was read beside `needed` frames of so many bytes in all is what T1 allows.
fn assert_spared(fetched: u64, (frames, needed): (u64, u64)) {
    assert!(needed <= fetched && fetched <= needed + needed / 32 + frames * 4096, "{fetched} for {needed} in {frames}");
}

/// "Reading 1/8 of every tensor along its first dimension reads at most 1.05x of those bytes plus chunk edges."
#[tokio::test(flavor = "multi_thread")]
async fn an_eighth_reads_an_eighth() {
    for (compression, dtype, element) in [
        (Compression::Off, "F32", 4),
        (Compression::Auto, "F32", 4),
        (Compression::Off, "BF16", 2),
        (Compression::Auto, "U8", 1),
    ] {
        let fixture = Fixture::new().await;
        let shapes: [&[u64]; 6] = [&[4096, 512], &[2048, 2048], &[2048], &[1000, 3000], &[512, 3, 1024], &[8, 300_000]];
        let names = ["embed", "proj", "norm", "odd", "cube", "long"];
        let len = |shape: &[u64]| usize::try_from(shape.iter().product::<u64>() * element).unwrap();
        let wholes: Vec<Vec<u8>> = (0..).zip(shapes).map(|(seed, shape)| noise(seed, len(shape))).collect();
        let tensors: Vec<Plain<'_>> = names
            .iter()
            .zip(shapes)
            .zip(&wholes)
            .map(|((name, shape), bytes)| (*name, dtype, shape, bytes.clone()))
            .collect();
        let path = fixture.path("model.safetensors");
        fs::write(&path, file(&tensors)).unwrap();
        fixture.save(&path, compression).await;
        for index in [0, 3, 7] {
            let shard = TensorSelector::new("*").unwrap().shard(Shard::new(index, 8).unwrap());
            let reading = fixture.repository.choose_tensors(&name("n"), None, &[shard]).await.unwrap();
            let before = fixture.gets();
            let (found, read) = fixture.carry_out(reading).await.unwrap();
            for (((_, bytes), shape), whole) in found.iter().zip(shapes).zip(&wholes) {
                let rows = shape[0].div_ceil(8) * index..(shape[0].div_ceil(8) * (index + 1)).min(shape[0]);
                let rest = shape[1..].iter().map(|&len| 0..len);
                let ranges: Vec<_> = std::iter::once(rows).chain(rest).collect();
                assert!(*bytes == sliced(whole, shape, &ranges, element), "{shape:?}");
            }
            let bytes = fixture.gets().1 - before.1;
            assert_eq!(bytes, read.fetched_bytes);
            let eighth = |shape: &[u64]| {
                let rows = shape[0].div_ceil(8);
                (rows * index).min(shape[0])..(rows * (index + 1)).min(shape[0])
            };
            let rows: Vec<_> = names.iter().zip(shapes).map(|(name, shape)| (*name, eighth(shape))).collect();
            let needed = fixture.needed("n", &rows).await;
            assert_eq!(needed.len() as u64, read.chunks);
            let stored: u64 = needed.iter().map(|(_, stored)| stored).sum();
            assert_spared(bytes, (read.chunks, stored));
            // Noise is stored raw: what else the chunks hold are edges.
            let edges = needed.iter().map(|(plain, _)| plain).sum::<u64>() - read.bytes;
            assert!(bytes * 20 <= (read.bytes + edges) * 21, "{dtype}: {read:?}");
            let even = TensorSelector::new("{embed,proj,cube}").unwrap().shard(Shard::new(index, 8).unwrap());
            let reading = fixture.repository.choose_tensors(&name("n"), None, &[even]).await.unwrap();
            let (_, exact) = fixture.carry_out(reading).await.unwrap();
            assert!(exact.fetched_bytes * 20 <= exact.bytes * 21, "{dtype}: {exact:?}");
        }
    }
}

/// T1: "Gaps between two chunks in a pack are read too where that is cheaper than another request".
#[tokio::test(flavor = "multi_thread")]
async fn short_chunks_are_not_read_for_lying_between_others() {
    let fixture = Fixture::new().await;
    // A sixteenth is noise: eight chunks of a tensor lie within what a request is worth.
    let mut whole = vec![0; 8 << 18];
    (0..).zip(whole.chunks_mut(16 << 10)).for_each(|(at, run)| run[..1 << 10].copy_from_slice(&noise(at, 1 << 10)));
    let names: Vec<String> = (0..12).map(|number| format!("layer-{number}")).collect();
    let plain = |seed: u8| whole.iter().map(|byte| byte ^ seed).collect::<Vec<u8>>();
    let tensors: Vec<Plain<'_>> =
        (0..).zip(&names).map(|(seed, name)| (name.as_str(), "U8", &[2048, 1024][..], plain(seed))).collect();
    let path = fixture.path("model.safetensors");
    fs::write(&path, file(&tensors)).unwrap();
    fixture.save(&path, Compression::Auto).await;
    let shard = TensorSelector::new("*").unwrap().shard(Shard::new(3, 8).unwrap());
    let reading = fixture.repository.choose_tensors(&name("n"), None, &[shard]).await.unwrap();
    let (found, read) = fixture.carry_out(reading).await.unwrap();
    assert!(found[1].1 == plain(1)[3 << 18..4 << 18]);
    let rows: Vec<_> = names.iter().map(|name| (name.as_str(), 768..1024)).collect();
    let needed = fixture.needed("n", &rows).await;
    let stored: u64 = needed.iter().map(|(_, stored)| stored).sum();
    assert_eq!((needed.len(), read.chunks), (12, 12));
    assert!(stored < 12 * (32 << 10), "{stored}");
    assert_spared(read.fetched_bytes, (12, stored));
    // All of it is still one request.
    let before = fixture.gets();
    let all = fixture.read(&["*"]).await.unwrap().1;
    assert!(all.fetched_bytes > 7 * read.fetched_bytes);
    assert!(fixture.gets().0 - before.0 <= 6, "manifest, map and the log, and a pack");
}

/// T1: "fetch the chunks that overlap the request, and their bases, each once however many tensors share it".
#[tokio::test(flavor = "multi_thread")]
async fn a_shared_chunk_is_fetched_once() {
    let fixture = Fixture::new().await;
    fixture.save(&golden().join("views.pt"), Compression::Off).await;
    let reading = fixture.repository.choose_tensors(&name("n"), None, &["*".parse().unwrap()]).await.unwrap();
    let before = fixture.gets();
    let (found, read) = fixture.carry_out(reading).await.unwrap();
    assert_eq!((found.len(), fixture.gets().0 - before.0), (10, 1), "one read for all");
    assert!(read.fetched_bytes < read.bytes, "{read:?}: tied tensors are read once");
}

/// Numbers that look trained, and move a little with each step.
fn trained(seed: u64, step: u64, len: usize) -> Vec<u8> {
    let noise = noise(seed, 2 * len);
    let starts = noise.as_chunks::<2>().0.iter().map(|pair| f32::from(i16::from_le_bytes(*pair)) * 1e-6);
    let moved = (0..).zip(starts).map(|(n, start)| start * (1.0 + step as f32 * 1e-6 * ((n * 31 % 97) as f32 - 48.0)));
    moved.flat_map(f32::to_le_bytes).collect()
}

/// T1: "fetch the chunks that overlap the request, and their bases, each once": boxes of tensors that are stored as
/// differences to another step, or derived from such.
#[tokio::test(flavor = "multi_thread")]
async fn boxes_of_differences_read_their_chunks_and_bases_once() {
    let fixture = Fixture::new().await;
    let shape = [1024, 1024];
    let (step, mut last) = (name("run/step-3"), Vec::new());
    for number in 1..=3 {
        let (w, v) = (trained(1, number, 1 << 20), trained(2, number, 1 << 20));
        let copy = rounded(&w);
        last = vec![("copy", "BF16", &shape[..], copy), ("w", "F32", &shape[..], w), ("v", "F32", &shape[..], v)];
        let path = fixture.path(&format!("step-{number}.safetensors"));
        fs::write(&path, file(&last)).unwrap();
        let run = name(&format!("run/step-{number}"));
        fixture.repository.save(&path, &run, &SaveOptions::default()).await.unwrap();
    }
    let saved = fixture.repository.saved(&step).await.unwrap();
    let stored_by = |codec: Codec| saved.map.frames.iter().filter(|frame| frame.codec == codec).count();
    assert_eq!((stored_by(Codec::Difference), stored_by(Codec::Derived)), (8, 4));

    for (tensors, box_of) in [
        (&["w"][..], [128..640, 0..1024]),
        (&["v"], [1023..1024, 0..1024]),
        (&["v"], [0..1024, 5..9]),
        (&["v"], [300..700, 1000..1024]),
        // What is derived needs the difference, and that its base.
        (&["copy"], [256..512, 0..1024]),
        (&["copy"], [0..700, 512..513]),
        (&["copy", "w", "v"], [384..512, 0..1024]),
        (&["copy", "w", "v"], [0..1024, 0..1024]),
    ] {
        let slices = Slices::of(box_of.clone());
        let selectors: Vec<_> = tensors.iter().map(|tensor| format!("{tensor}{slices}").parse().unwrap()).collect();
        let reading = fixture.repository.choose_tensors(&step, None, &selectors).await.unwrap();
        let before = fixture.gets();
        let (found, read) = fixture.carry_out(reading).await.unwrap();
        assert_eq!(read.fetched_bytes, fixture.gets().1 - before.1);
        for (tensor, bytes) in &found {
            let (_, dtype, _, whole) = last.iter().find(|(name, ..)| name == tensor).unwrap();
            let element = if *dtype == "F32" { 4 } else { 2 };
            assert!(*bytes == sliced(whole, &shape, &box_of, element), "{tensor}{slices}");
        }
        let rows: Vec<_> = tensors.iter().map(|tensor| (*tensor, box_of[0].clone())).collect();
        let needed = fixture.needed("run/step-3", &rows).await;
        assert_spared(read.fetched_bytes, (needed.len() as u64, needed.iter().map(|(_, stored)| stored).sum()));
    }

    // The same into a file, a rank's share of it.
    let shard = TensorSelector::new("w").unwrap().shard(Shard::new(5, 8).unwrap());
    let out = fixture.path("out.safetensors");
    let options = RestoreTensorsOptions::default();
    let report = fixture.repository.restore_tensors(&step, None, &[shard], &out, &options).await.unwrap();
    let needed = fixture.needed("run/step-3", &[("w", 640..768)]).await;
    assert_eq!(needed.len(), 2, "a difference and its base");
    assert_spared(report.fetched_bytes, (2, needed.iter().map(|(_, stored)| stored).sum()));
    let written = fs::read(out).unwrap();
    assert!(written.ends_with(&sliced(&last[1].3, &shape, &[640..768, 0..1024], 4)));
}

/// Zeros that were not stored are given too.
#[tokio::test(flavor = "multi_thread")]
async fn holes_are_zeros() {
    let fixture = Fixture::new().await;
    let (path, len) = (fixture.path("sparse.safetensors"), 24 << 20);
    let header = file(&[("w", "F32", &[6144, 1024], Vec::new())]);
    let header = String::from_utf8_lossy(&header[8..]).replace("[0,0]", &format!("[0,{len}]"));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.into_bytes());
    let start = bytes.len() as u64;
    let sparse = fs::File::create(&path).unwrap();
    sparse.set_len(start + len).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &bytes, 0).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &noise(1, 8000), start + (8 << 20) + 50).unwrap();
    let mut whole = vec![0; 24 << 20];
    whole[(8 << 20) + 50..(8 << 20) + 8050].copy_from_slice(&noise(1, 8000));
    fixture.save(&path, Compression::Auto).await;
    assert!(fixture.one("w").await == whole);
    let column = sliced(&whole, &[6144, 1024], &[0..6144, 100..900], 4);
    assert!(fixture.one("w[:, 100:900]").await == column);
}

/// T3: "naming exactly the requested tensors that it affects; the others can be read without them, and so can a box
/// that does not touch the chunk."
#[tokio::test(flavor = "multi_thread")]
async fn damage_hits_the_tensors_that_need_it() {
    let fixture = Fixture::new().await;
    let names = ["a", "b", "c", "d"];
    let content: Vec<_> = (0..4).map(|seed| noise(seed, 3 << 20)).collect();
    let tensors: Vec<Plain<'_>> =
        names.iter().zip(&content).map(|(name, bytes)| (*name, "F32", &[768, 1024][..], bytes.clone())).collect();
    let path = fixture.path("model.safetensors");
    fs::write(&path, file(&tensors)).unwrap();
    fixture.save(&path, Compression::Off).await;
    let packs: Vec<_> = fixture.store.objects().list(Some(&"pack".into())).try_collect().await.unwrap();
    // In the second half of b.
    let needle = &content[1][(2 << 20) + 5000..(2 << 20) + 5064];
    let mut flipped = 0;
    for key in packs.iter().map(|meta| &meta.location) {
        let mut pack = fixture.store.objects().get(key).await.unwrap().bytes().await.unwrap().to_vec();
        let Some(at) = pack.windows(needle.len()).position(|window| window == needle) else { continue };
        pack[at] ^= 1;
        fixture.store.objects().put(key, pack.into()).await.unwrap();
        flipped += 1;
    }
    assert_eq!(flipped, 1);

    let error = fixture.refused("*").await;
    assert_eq!(error.kind(), ErrorKind::Damaged);
    assert!(error.to_string().starts_with("1 of 4 tensors cannot be read at n: got damage in b"), "{error}");
    for (tensor, whole) in [("a", &content[0]), ("c", &content[2]), ("d", &content[3])] {
        assert!(fixture.one(tensor).await == **whole);
    }
    assert!(fixture.one("b[0:256]").await == content[1][..1 << 20], "the rows that are whole");
    assert_eq!(fixture.refused("b[600:]").await.kind(), ErrorKind::Damaged);

    for pack in &packs {
        fixture.store.objects().delete(&pack.location).await.unwrap();
    }
    let error = fixture.refused("{a,b}").await;
    assert!(error.kind() == ErrorKind::Damaged && error.to_string().contains("damage in a, b"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn packs_that_move_meanwhile_are_followed() {
    let fixture = Fixture::new().await;
    let (kept, path) = (noise(1, 2 << 20), fixture.path("tree/model.safetensors"));
    fs::write(&path, file(&[("w", "F32", &[512, 1024], kept.clone())])).unwrap();
    fs::write(fixture.path("tree/other"), noise(2, 8 << 20)).unwrap();
    fixture.repository.save(path.parent().unwrap(), &name("all"), &SaveOptions::default()).await.unwrap();
    fixture.save(&path, Compression::Auto).await;
    let reading = fixture.repository.choose_tensors(&name("n"), None, &["w".parse().unwrap()]).await.unwrap();
    fixture.repository.remove(&name("all")).await.unwrap();
    let collect = CollectOptions::at_once();
    assert_eq!(fixture.repository.collect(&collect).await.unwrap().repacked_packs, 1);
    assert!(fixture.carry_out(reading).await.unwrap().0[0].1 == kept);
}

/// T1: "nothing arrives after the read ended or was dropped".
#[tokio::test(flavor = "multi_thread")]
async fn a_sink_is_not_called_after_the_end() {
    let fixture = Fixture::new().await;
    let path = fixture.path("model.safetensors");
    fs::write(&path, file(&[("w", "F32", &[8192, 1024], noise(1, 32 << 20))])).unwrap();
    fixture.save(&path, Compression::Auto).await;
    for fails in [true, false] {
        let reading = fixture.repository.choose_tensors(&name("n"), None, &["w".parse().unwrap()]).await.unwrap();
        let (calls, called) = (Arc::new(Mutex::new(0)), Arc::new(Notify::new()));
        let sink = {
            let (calls, called) = (Arc::clone(&calls), Arc::clone(&called));
            move |_: usize, _: u64, _: &[u8]| {
                *calls.lock().unwrap() += 1;
                called.notify_one();
                std::thread::sleep(Duration::from_millis(20));
                if fails { Err(Error::denied("enough")) } else { Ok(()) }
            }
        };
        let (reading, progress) = (Arc::new(reading), Progress::default());
        let work = fixture.repository.read_tensors(&reading, Arc::new(sink), &progress);
        if fails {
            assert_eq!(work.await.unwrap_err().kind(), ErrorKind::Denied);
        } else {
            // Dropped in the middle: the sink has been called, and is not done.
            tokio::select! {
                ended = work => panic!("it ended by itself: {:?}", ended.err()),
                () = called.notified() => {}
            }
        }
        let before = *calls.lock().unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(*calls.lock().unwrap(), before, "fails: {fails}");
    }
}
