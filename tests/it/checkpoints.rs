//! Saving what torch and safetensors wrote (tests/golden/checkpoints): the same files come back, and their tensors are known.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use towline::ops::{RestoreOptions, SaveOptions, ShownTensor, ShownTree};
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;

use crate::data::{name, noise, safetensors, tree_digest};

/// A copy of the golden checkpoints with a file of each kind that cannot be understood.
fn sample(root: &Path) -> PathBuf {
    let (from, to) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoints"), root.join("source"));
    for folder in ["", "dcp"] {
        fs::create_dir_all(to.join(folder)).unwrap();
        for file in fs::read_dir(from.join(folder)).unwrap().map(|entry| entry.unwrap().path()) {
            if file.is_file() {
                fs::copy(&file, to.join(folder).join(file.file_name().unwrap())).unwrap();
            }
        }
    }
    let whole = fs::read(from.join("training.bin")).unwrap();
    let mut bomb = whole.clone();
    let pickle = whole.windows(3).position(|at| at == b"\x80\x02}").unwrap();
    bomb[pickle + 2] = b'I';
    fs::write(to.join("bomb.pt"), bomb).unwrap();
    fs::write(to.join("cut.pt"), &whole[..whole.len() - 30]).unwrap();
    // Too long to be looked at in memory.
    fs::write(to.join("long.pt"), [b"PK\x03\x04", &noise(3, 2 << 20)[..], &whole].concat()).unwrap();
    to
}

async fn in_memory(cache: &Path) -> Repository {
    let options = OpenOptions { cache: Some(cache.to_owned()), memory: Some(256 << 20), ..OpenOptions::default() };
    Repository::create(Store::memory(), options).await.unwrap().0
}

fn tensors<'s>(shown: &'s ShownTree, path: &str) -> Vec<ShownTensor<'s>> {
    shown.entries().find(|entry| entry.path == path).unwrap().tensors.iter().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn checkpoints_come_back_and_their_tensors_are_known() {
    let dir = tempfile::tempdir().unwrap();
    let source = sample(dir.path());
    let repository = in_memory(dir.path()).await;
    repository.save(&source, &name("run"), &SaveOptions::default()).await.unwrap();
    let dest = dir.path().join("dest");
    repository.restore(&name("run"), None, &dest, &RestoreOptions::default()).await.unwrap();
    assert_eq!(tree_digest(&source), tree_digest(&dest));

    let shown = repository.show(&name("run")).await.unwrap();
    let cut = |path: &str| shown.entries().find(|entry| entry.path == path).unwrap().cut;
    for file in ["alone.pt", "dtypes.pt", "objects.pth", "training.bin", "views.pt", "dcp/__0_0.distcp"] {
        assert_eq!(cut(file), Some("tensor"), "{file}");
    }
    for file in ["bomb.pt", "cut.pt", "long.pt", "legacy.pt", "dcp/.metadata"] {
        assert_eq!((cut(file), tensors(&shown, file).len()), (Some("content"), 0), "{file}");
    }
    let names: Vec<&str> = tensors(&shown, "alone.pt").iter().map(|tensor| tensor.name).collect();
    assert_eq!(names, ["tensor"]);
    let parts: Vec<_> = ["dcp/__0_0.distcp", "dcp/__1_0.distcp"]
        .iter()
        .flat_map(|file| tensors(&shown, file))
        .filter(|tensor| tensor.name == "model.uneven")
        .map(|tensor| (tensor.shape.to_vec(), tensor.offsets.map(<[u64]>::to_vec), tensor.whole.map(<[u64]>::to_vec)))
        .collect();
    let part = |rows, from| (vec![rows, 3], Some(vec![from, 0]), Some(vec![5, 3]));
    assert_eq!(parts, [part(3, 0), part(2, 3)]);
}

/// What a file of parts holds is said by another file: with that gone, or come, the manifest is the one that a save which
/// reads everything would make.
#[tokio::test(flavor = "multi_thread")]
async fn parts_are_looked_at_again_when_their_metadata_changes() {
    let dir = tempfile::tempdir().unwrap();
    let source = sample(dir.path()).join("dcp");
    let repository = in_memory(dir.path()).await;
    let metadata = fs::read(source.join(".metadata")).unwrap();
    for (step, present) in [true, false, true].into_iter().enumerate() {
        if present {
            fs::write(source.join(".metadata"), &metadata).unwrap();
        } else {
            fs::remove_file(source.join(".metadata")).unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
        let cached = repository.save(&source, &name("dcp"), &SaveOptions::default()).await.unwrap();
        let options = SaveOptions { reread: true, ..SaveOptions::default() };
        let read = repository.save(&source, &name("dcp"), &options).await.unwrap();
        assert_eq!(cached.manifest, read.manifest, "{step}");
        let shown = repository.show(&name("dcp")).await.unwrap();
        assert_eq!(!tensors(&shown, "__0_0.distcp").is_empty(), present, "{step}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_index_of_a_sharded_checkpoint_misses_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source/model");
    fs::create_dir_all(&source).unwrap();
    fs::write(source.join("1.safetensors"), safetensors(1, &[("a", 10), ("b", 10)])).unwrap();
    fs::write(source.join("2.safetensors"), safetensors(2, &[("c", 10)])).unwrap();
    let index = |map: &str| {
        fs::write(source.join("model.safetensors.index.json"), format!(r#"{{"weight_map": {{{map}}}}}"#)).unwrap();
    };
    let repository = in_memory(dir.path()).await;
    let warnings = async || {
        let saved = repository.save(source.parent().unwrap(), &name("run"), &SaveOptions::default()).await;
        saved.unwrap().warnings
    };
    index(r#""a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors""#);
    assert!(warnings().await.is_empty());
    index(r#""a": "1.safetensors", "x": "2.safetensors", "y": "2.safetensors", "z": "3.safetensors""#);
    let at = "model/model.safetensors.index.json: model/";
    assert_eq!(
        warnings().await,
        [
            format!("{at}2.safetensors has no tensor x and 1 others, which this index names"),
            format!("{at}3.safetensors is lacking, which this index names"),
        ]
    );
    index("nonsense");
    assert!(warnings().await.is_empty(), "then it is a file like any other");
    // A short index of very many files in a folder with a long path.
    let absent: Vec<String> = (0..20_000).map(|nth| format!(r#""{nth}": "{nth}""#)).collect();
    index(&absent.join(","));
    let deep = (0..8).fold(source.parent().unwrap().to_owned(), |path, _| path.join("d".repeat(200)));
    fs::create_dir_all(&deep).unwrap();
    fs::rename(&source, deep.join("model")).unwrap();
    let warnings = warnings().await;
    assert!(warnings.iter().map(String::len).sum::<usize>() < 80 << 10, "{}", warnings.len());
    assert_eq!(warnings.last().unwrap(), &format!("{} more", 20_001 - warnings.len()));
}

/// As `bindings/python/python/towline/_pointer_files.py` writes them.
#[tokio::test(flavor = "multi_thread")]
async fn pointer_files_in_the_place_of_checkpoints_are_said() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir_all(source.join("last")).unwrap();
    let pointer: &[u8] = b"PK\x03\x04 archive/data.pkl archive/towline.json{} PK\x05\x06";
    fs::write(source.join("epoch=1.ckpt"), pointer).unwrap();
    fs::write(source.join("notes.txt"), "archive/towline.json").unwrap();
    // Old enough for the stat cache: later saves warn of files that have not changed, too.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let repository = in_memory(dir.path()).await;
    let warnings = async |run: &str| {
        let saved = repository.save(source.as_path(), &name(run), &SaveOptions::default()).await;
        saved.unwrap().warnings
    };
    let one = warnings("one").await;
    assert!(matches!(&one[..], [told] if told.starts_with("epoch=1.ckpt is a pointer file of Tow")), "{one:?}");
    fs::write(source.join("last/a.ckpt"), pointer).unwrap();
    fs::write(source.join("last/b.ckpt"), pointer).unwrap();
    let three = warnings("three").await;
    assert!(
        matches!(&three[..], [told] if told.starts_with("epoch=1.ckpt and 2 more are pointer files of Tow")),
        "{three:?}"
    );
}
