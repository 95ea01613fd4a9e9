//! Trees in memory, as a training loop has them: M1 of docs/semantics.md.

use std::fs;
use std::num::NonZeroU32;

use bytes::Bytes;
use towline::error::ErrorKind;
use towline::ops::{PartOptions, RestoreOptions, SaveOptions};
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;
use towline::tree::MemoryFile;

use crate::data::{name, noise, safetensors};

/// What is at a path of the trees here.
fn content() -> [(&'static str, Vec<u8>); 4] {
    [
        ("model.safetensors", safetensors(3, &[("a", 300_000), ("b", 7), ("c", 1_100_000)])),
        ("deep/er/small.json", b"{\"step\": 1}".to_vec()),
        ("deep/plain.bin", noise(4, 3_000_000)),
        ("empty", Vec::new()),
    ]
}

/// The same, in segments that begin and end anywhere.
fn in_memory() -> Vec<MemoryFile> {
    let segments = |bytes: Vec<u8>| {
        let mut rest = Bytes::from(bytes);
        let mut segments = Vec::new();
        for at in 1.. {
            let segment = rest.split_to((at * 99_991).min(rest.len()));
            segments.push(segment);
            if rest.is_empty() {
                break;
            }
        }
        segments
    };
    content().into_iter().map(|(path, bytes)| MemoryFile::new(path, segments(bytes))).collect()
}

async fn repository() -> (tempfile::TempDir, Repository) {
    let dir = tempfile::tempdir().unwrap();
    let options =
        OpenOptions { cache: Some(dir.path().join("cache")), memory: Some(128 << 20), ..OpenOptions::default() };
    let repository = Repository::create(Store::memory(), options).await.unwrap().0;
    (dir, repository)
}

/// M1 A tree in memory is saved as the same files on a disk would be.
#[tokio::test(flavor = "multi_thread")]
async fn a_tree_in_memory_is_saved_as_from_a_disk() {
    let (dir, repository) = repository().await;
    let disk = dir.path().join("disk");
    for (path, bytes) in content() {
        fs::create_dir_all(disk.join(path).parent().unwrap()).unwrap();
        fs::write(disk.join(path), bytes).unwrap();
    }
    let options = SaveOptions::default();
    let from_disk = repository.save(&disk, &name("disk"), &options).await.unwrap();
    let from_memory = repository.save(in_memory(), &name("memory"), &options).await.unwrap();
    assert_eq!((from_memory.new_chunks, from_memory.new_bytes), (0, 0), "every chunk was there");
    assert_eq!((from_memory.logical_bytes, from_memory.files), (from_disk.logical_bytes, 4));
    let listed = |of| repository.tensors(of, &[]);
    let (a, b) = (name("disk"), name("memory"));
    assert_eq!(listed(&a).await.unwrap(), listed(&b).await.unwrap());
    assert_eq!(listed(&a).await.unwrap().len(), 3);

    let restored = dir.path().join("restored");
    repository.restore(&b, None, &restored, &RestoreOptions::default()).await.unwrap();
    for (path, bytes) in content() {
        assert!(fs::read(restored.join(path)).unwrap() == bytes, "{path}");
    }
}

/// M1, second half: ranks save parts of a step from memory, and files from a disk beside them.
#[tokio::test(flavor = "multi_thread")]
async fn ranks_save_from_memory_too() {
    let (dir, repository) = repository().await;
    let ranks = NonZeroU32::new(2).unwrap();
    let part = |rank| PartOptions { rank, ranks, attempt: "first".parse().unwrap() };
    let (step, options) = (name("run/step-1"), SaveOptions::default());
    let first = repository.save_part(in_memory(), &step, &part(0), &options).await.unwrap();
    assert!(!first.complete);
    let disk = dir.path().join("disk");
    fs::create_dir_all(&disk).unwrap();
    fs::write(disk.join("rank-1"), noise(9, 10_000)).unwrap();
    let second = repository.save_part(&disk, &step, &part(1), &options).await.unwrap();
    assert!(second.complete && second.step.is_some());
    // Coming again finds that the step holds what the rank holds, and other content refused.
    assert!(repository.save_part(in_memory(), &step, &part(0), &options).await.unwrap().complete);
    let other = vec![MemoryFile::new("model.safetensors", [Bytes::from_static(b"other")])];
    let refused = repository.save_part(other, &step, &part(0), &options).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict);
}

#[tokio::test(flavor = "multi_thread")]
async fn paths_that_lead_elsewhere_are_refused() {
    let (_dir, repository) = repository().await;
    for path in ["/etc/passwd", "../up", "a//b", ""] {
        let files = vec![MemoryFile::new(path, [Bytes::from_static(b"x")])];
        let error = repository.save(files, &name("n"), &SaveOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{path}");
    }
    assert!(repository.list(None).await.is_ok_and(|names| names.is_empty()));
}
