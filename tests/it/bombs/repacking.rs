//! Many trees that use one mostly unused pack: a collect that rewrites it has one of them in memory at a time.

use super::*;
use crate::data::noise;

/// Links in each tree.
const LINKS: u32 = 40_000;
/// Trees, of some 6 MiB each.
const TREES: u32 = 40;

#[test]
fn trees_of_a_rewritten_pack_are_in_memory_one_at_a_time() {
    let fixture = Fixture::new();
    run(async {
        let repository = fixture.open().await;
        let file = |path: &str, seed| MemoryFile::new(path, [Bytes::from(noise(seed, 500_000))]);
        let all = vec![file("a", 1), file("b", 2), file("c", 3), file("d", 4)];
        repository.save(all, &name("all"), &SaveOptions::default()).await.unwrap();
        repository.save(vec![file("a", 1)], &name("one"), &SaveOptions::default()).await.unwrap();
        let one = repository.saved(&name("one")).await.unwrap();
        let mut tree = one.manifest.clone();
        tree.entries.extend((0..LINKS).map(|n| TreeEntry {
            path: format!("link-{n:06}").into_bytes(),
            mode: 0o777,
            mtime: Timestamp(0),
            kind: EntryKind::Symlink(vec![b'x'; 64]),
        }));
        let (manifest, body) = tree.encode();
        let map = Map { manifest, ..one.map.clone() };
        for n in 0..TREES {
            plant_as(&repository, &format!("tree-{n}"), &body, &map).await;
        }
        repository.remove(&name("all")).await.unwrap();
    });
    let (report, peak) = measured(async { fixture.open().await.collect(&CollectOptions::at_once()).await.unwrap() });
    assert_eq!((report.repacked_packs, report.unused_bytes), (1, 0), "{report:?}");
    assert!(peak < 2 * MEMORY_MIN, "{peak}");
    let verified = run(async { fixture.open().await.verify(None, &VerifyOptions::default()).await.unwrap() });
    assert!(verified.damaged.is_empty(), "{verified:?}");
}
