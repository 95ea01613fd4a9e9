//! Trees of few bytes whose tensors stand for very many.

use super::*;

/// A file of `chunks` chunks, and `tensors` tensors that each lie over all of it.
fn overlapping(tensors: usize, chunks: u32) -> (Manifest, Map) {
    let size = u64::from(chunks) * 100;
    let tensor = |n: usize| TensorEntry {
        name: format!("t{n}"),
        dtype: "U8".into(),
        shape: vec![size],
        range: 0..size,
        part: None,
    };
    let content = Content {
        size,
        cut: Cut::Tensor,
        pieces: vec![Piece { hole: 0, first: 0, count: chunks }],
        tensors: (0..tensors).map(tensor).collect(),
    };
    let mut tree = empty_tree();
    tree.chunks = ChunkList {
        ids: (0..chunks).map(|n| ChunkId::of(&n.to_le_bytes())).collect(),
        lens: vec![100; chunks as usize],
    };
    let kind = EntryKind::File(content);
    tree.entries.push(TreeEntry { path: b"m.safetensors".to_vec(), mode: 0o644, mtime: Timestamp(0), kind });
    let pack = PackRef { id: Owned::fresh(SessionId::random()), len: 1 << 30, footer_len: 99, chunks };
    let frame = |n| Frame {
        pack: 0,
        ordinal: n,
        offset: u64::from(n) * 100,
        stored_len: 100,
        codec: if n % 2 == 0 { Codec::Raw } else { Codec::Zstd },
        base: None,
        alone_len: 0,
    };
    let map = Map {
        manifest: tree.encode().0,
        packs: vec![pack],
        frames: (0..chunks).map(frame).collect(),
        further: Vec::new(),
    };
    (tree, map)
}

#[test]
fn tensors_over_the_same_chunks_do_not_exceed_the_budget() {
    let fixture = Fixture::new();
    run(async {
        let (tree, map) = overlapping(5_000, 20_000);
        plant_with(&fixture.open().await, &tree.encode().1, &map).await;
    });
    let choose = |selector: &'static str| {
        let selectors: Vec<TensorSelector> = vec![selector.parse().unwrap()];
        let fixture = &fixture;
        async move { fixture.open().await.choose_tensors(&name("bomb"), None, &selectors).await }
    };
    let (refused, peak) = measured(choose("t*"));
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    let help = error.help_text().unwrap();
    assert!(help.contains("fewer tensors") && help.contains("--memory"), "{help}");
    assert!(peak < MEMORY_MIN + 4 * MIB, "{peak}");
    // A few of them fit.
    let chosen = run(choose("t1[0-9]")).unwrap();
    assert_eq!((chosen.tensors().len(), chosen.chunk_count()), (10, 20_000));
    // All of them are shown.
    let (shown, peak) = measured(async { fixture.open().await.show(&name("bomb")).await });
    let shown = shown.unwrap();
    let tensors = shown.entries().nth(1).unwrap().tensors;
    assert_eq!(tensors.iter().len(), 5_000);
    assert!(tensors.iter().all(|tensor| tensor.stored_bytes == 2_000_000 && tensor.codec == "raw+zstd"));
    assert!(peak < MEMORY_MIN + 4 * MIB, "{peak}");
}

#[test]
fn sizes_that_no_number_holds_together_are_refused() {
    let file = |n: u8, size: u64, tensors: usize| {
        let tensor = |n| TensorEntry {
            name: format!("t{n}"),
            dtype: "U8".into(),
            shape: vec![size],
            range: 0..size,
            part: None,
        };
        let tensors = (0..tensors).map(tensor).collect();
        let kind = EntryKind::File(Content { size, cut: Cut::Tensor, pieces: Vec::new(), tensors });
        TreeEntry { path: vec![n], mode: 0o644, mtime: Timestamp(0), kind }
    };
    let read = |files: Vec<TreeEntry>| {
        let mut tree = empty_tree();
        tree.entries.extend(files);
        Manifest::decode(&tree.encode().1)
    };
    // All holes.
    let half = 1 << 63;
    let error = read(vec![file(b'a', half, 0), file(b'b', half, 0)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    assert!(format!("{error:?}").contains("2^64"), "{error:?}");
    assert_eq!(read(vec![file(b'a', half, 1)]).unwrap_err().kind(), ErrorKind::Damaged, "tensors count too");
    assert_eq!(read(vec![file(b'a', half - 1, 1), file(b'b', 1, 0)]).unwrap().logical_bytes(), half);
}

#[test]
fn a_tensor_in_a_hole_takes_no_room_on_the_disk() {
    const LEN: u64 = 64 << 30;
    let fixture = Fixture::new();
    let (path, out) = (fixture.dir.path().join("model.safetensors"), fixture.dir.path().join("out.safetensors"));
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{LEN}],"data_offsets":[0,{LEN}]}}}}"#);
    fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(8 + header.len() as u64 + LEN).unwrap();
    run(async {
        let repository = fixture.open().await;
        repository.save(path.as_path(), &name("w"), &SaveOptions::default()).await.unwrap();
        let (selector, options) = ("w".parse().unwrap(), RestoreTensorsOptions::default());
        repository.restore_tensors(&name("w"), None, &[selector], &out, &options).await.unwrap();
    });
    let found = fs::metadata(&out).unwrap();
    assert!(found.len() > LEN && found.blocks() * 512 < MIB, "{} blocks", found.blocks());
}

/// A file of zeros with `tensors`, whose path is `path`.
fn in_a_hole(path: &str, size: u64, tensors: Vec<TensorEntry>) -> Manifest {
    let mut tree = empty_tree();
    for (end, _) in path.match_indices('/') {
        let kind = EntryKind::Folder;
        tree.entries.push(TreeEntry { path: path[..end].into(), mode: 0o755, mtime: Timestamp(0), kind });
    }
    let content = Content { size, cut: Cut::Tensor, pieces: Vec::new(), tensors };
    let kind = EntryKind::File(content);
    tree.entries.push(TreeEntry { path: path.into(), mode: 0o644, mtime: Timestamp(0), kind });
    tree
}

/// Chooses all tensors of a planted tree, on this thread.
fn choose_all(tree: &Manifest) -> (towline::Result<usize>, u64) {
    let fixture = Fixture::new();
    let (repository, saved) = run(async {
        let repository = fixture.open().await;
        plant(&repository, &tree.encode().1).await;
        let saved = repository.saved(&name("bomb")).await.unwrap().shared();
        (repository, saved)
    });
    let selectors: Vec<TensorSelector> = vec!["*".parse().unwrap()];
    let (chosen, peak) = peak_of(|| repository.choose_tensors_in(&saved, None, &selectors));
    (chosen.map(|chosen| chosen.tensors().len()), peak as u64)
}

/// Every second row of one tensor, and columns that cross all the others.
#[test]
fn parts_that_cross_each_other_do_not_exceed_the_budget() {
    let (columns, rows) = (800_u64, 3_000_u64);
    let part = |shape: [u64; 3], offsets: [u64; 3]| TensorEntry {
        name: "w".into(),
        dtype: "U8".into(),
        range: 0..shape.iter().product(),
        shape: shape.into(),
        part: Some(TensorPart { shape: vec![2, rows, columns], offsets: offsets.into() }),
    };
    let mut parts: Vec<TensorEntry> = (0..rows).step_by(2).map(|at| part([2, 1, columns], [0, at, 0])).collect();
    parts.extend((0..columns).map(|at| part([1, rows, 1], [1, 0, at])));
    let (refused, peak) = choose_all(&in_a_hole("m", 1 << 30, parts));
    let error = refused.unwrap_err();
    assert!(error.to_string().contains("overlap in more ways"), "{error}");
    assert!(peak < 40 * MIB, "{peak}");
}

/// The manifest has the path once, and lists of tensors have it for each.
#[test]
fn a_long_path_of_many_tensors_counts_for_each() {
    let path = vec!["f".repeat(250); 16].join("/");
    let tensor =
        |n: usize| TensorEntry { name: n.to_string(), dtype: "U8".into(), shape: vec![0], range: 0..0, part: None };
    let tree = in_a_hole(&path, 1, (0..50_000).map(tensor).collect());
    let (refused, peak) = choose_all(&tree);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Exhausted);
    assert!(peak < MEMORY_MIN, "{peak}");
    let fixture = Fixture::new();
    let (listed, peak) = measured(async {
        let repository = fixture.open().await;
        plant(&repository, &tree.encode().1).await;
        repository.tensors(&name("bomb"), &[]).await
    });
    let error = listed.unwrap_err();
    assert!(error.kind() == ErrorKind::Exhausted && error.help_text().unwrap().contains("fewer tensors"), "{error}");
    assert!(peak < 2 * MEMORY_MIN, "{peak}");
}
