//! Tests of selectors, and of tensors in parts.

use proptest::prelude::*;

use super::globals::{Global, globals};
use super::selector::{Index, TensorSelector};
use crate::chunker::Cut;
use crate::clock::Timestamp;
use crate::error::ErrorKind;
use crate::format::{Content, EntryKind, Manifest, TensorEntry, TensorPart, TreeEntry};

/// A tensor's name, and where it begins in the whole if it is a part.
type Named<'a> = (&'a str, Option<u64>);

/// Files of tensors, each F32 of two elements; a part, with its offset, of four.
fn manifest(files: &[(&str, &[Named<'_>])]) -> Manifest {
    let tensor = |(name, part): &Named<'_>| TensorEntry {
        name: (*name).to_owned(),
        dtype: "F32".to_owned(),
        shape: vec![2],
        range: 0..8,
        part: part.map(|at| TensorPart { shape: vec![4], offsets: vec![at] }),
    };
    let entry = |(path, tensors): &(&str, &[Named<'_>])| {
        let tensors = tensors.iter().map(tensor).collect();
        let content = Content { size: 8, cut: Cut::Tensor, pieces: Vec::new(), tensors };
        TreeEntry { path: path.as_bytes().to_vec(), mode: 0, mtime: Timestamp(0), kind: EntryKind::File(content) }
    };
    Manifest { entries: files.iter().map(entry).collect(), ..Manifest::default() }
}

fn shown<'m>(globals: &[Global<'m>]) -> Vec<(&'m str, &'m str, usize)> {
    let path = |global: &Global<'m>| std::str::from_utf8(global.path).unwrap();
    globals.iter().map(|global| (path(global), global.name, global.parts.len())).collect()
}

#[test]
fn parts_are_one_tensor_within_a_folder() {
    let tree = manifest(&[
        ("__0", &[("w", Some(0))]),
        ("a/__0", &[("w", Some(0)), ("v", Some(0))]),
        ("a/__1", &[("w", Some(2))]),
        ("a/model", &[("w", None)]),
        ("b/__0", &[("w", Some(0))]),
        ("copy", &[("w", None)]),
    ]);
    let expected = [("", "w", 1), ("a", "w", 2), ("a", "v", 1), ("a/model", "w", 1), ("b", "w", 1), ("copy", "w", 1)];
    assert_eq!(shown(&globals(&tree)), expected);
}

#[test]
fn texts_select_by_name_and_path() {
    let tree = manifest(&[
        ("deep/er/x.bin", &[("w", None)]),
        ("m-1.safetensors", &[("layers.0.w", None), ("layers.1.w", None), ("odd[0]", None)]),
        ("m-2.safetensors", &[("layers.2.w", None), ("a:b", None), ("w", None)]),
        ("optim/__0", &[("w", Some(0))]),
    ]);
    let globals = globals(&tree);
    let name = "n".parse().unwrap();
    let select = |text: &str, below: Option<&[u8]>| {
        let selector: TensorSelector = text.parse().unwrap();
        assert_eq!(selector.to_string().parse::<TensorSelector>().unwrap().to_string(), selector.to_string(), "{text}");
        Index::default().matching(&globals, &selector, &name, below).unwrap_or_default()
    };
    for (text, expected) in [
        ("w", &[0, 6, 7][..]),
        ("*", &[0, 1, 2, 3, 4, 5, 6, 7]),
        ("layers.*.w", &[1, 2, 4]),
        ("layers.[01].w[0:1]", &[1, 2]),
        ("layers.?.w[:]", &[1, 2, 4]),
        ("{w,layers.2*}", &[0, 4, 6, 7]),
        ("odd[0]", &[3]),
        ("odd[0][0:1]", &[3]),
        ("**:a:b", &[5]),
        ("m-*:layers.*", &[1, 2, 4]),
        ("m-2.safetensors:w", &[6]),
        ("./deep/:w", &[0]),
        ("deep/er:w", &[0]),
        ("*/er/*:w", &[0]),
        ("*.bin:w", &[]),
        ("**/*.bin:w", &[0]),
        ("optim:*", &[7]),
        ("optim/__0:*", &[]),
        ("layers", &[]),
    ] {
        assert_eq!(select(text, None), expected, "{text}");
    }
    assert_eq!(select("w", Some(b"deep")), [0]);
    assert_eq!(select("w", Some(b"m-2.safetensors")), [6]);
    assert_eq!(select("w", Some(b"dee")), Vec::<usize>::new());
    for text in ["", ":w", "p:", "[0:1]", "w[0:1:2]", "w[a:]", "a[", "{a"] {
        match text.parse::<TensorSelector>() {
            Ok(selector) => assert!(text == ":w" && selector.to_string() == ".:w", "{text}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Usage, "{text}"),
        }
    }
}

/// As JAX names them.
#[test]
fn patterns_of_names_take_slashes_and_those_of_paths_do_not() {
    let tensors: &[Named<'_>] = &[("params/dense/kernel", None), ("params/dense/bias", None), ("step", None)];
    let tree = manifest(&[("a.bin", tensors), ("sub/b.bin", tensors)]);
    let globals = globals(&tree);
    for (text, expected) in [
        ("*", &[0, 1, 2, 3, 4, 5][..]),
        ("**", &[0, 1, 2, 3, 4, 5]),
        ("*[0:1]", &[0, 1, 2, 3, 4, 5]),
        ("params/*", &[0, 1, 3, 4]),
        ("params/dense/*[0:2]", &[0, 1, 3, 4]),
        ("params/dense/kernel[0:2]", &[0, 3]),
        ("*kernel", &[0, 3]),
        ("*.bin:*kernel[:]", &[0]),
        ("sub/*:params*", &[3, 4]),
        ("sub/b.bin:params/dense/bias", &[4]),
    ] {
        let selector: TensorSelector = text.parse().unwrap();
        let found = Index::default().matching(&globals, &selector, &"n".parse().unwrap(), None);
        assert_eq!(found.unwrap_or_default(), expected, "{text}");
    }
}

/// Hours, if each selector looks at all tensors of its name.
#[test]
fn a_tensor_of_each_of_very_many_files_is_selected() {
    let paths: Vec<String> = (0..200_000).map(|n| format!("f{n:06}/x")).collect();
    let tensors: &[Named<'_>] = &[("w", None)];
    let files: Vec<(&str, &[Named<'_>])> = paths.iter().map(|path| (path.as_str(), tensors)).collect();
    let tree = manifest(&files);
    let (globals, name, mut index) = (globals(&tree), "n".parse().unwrap(), Index::default());
    for (at, path) in paths.iter().enumerate() {
        let folder = path.strip_suffix("/x").unwrap();
        for path in [path, folder] {
            let selector = TensorSelector::named("w").at_path(path);
            assert_eq!(index.matching(&globals, &selector, &name, None).unwrap(), [at]);
        }
    }
}

proptest! {
    /// A selector takes the tensors that a look at each finds, in their order.
    #[test]
    fn the_index_finds_what_a_look_at_each_tensor_does(
        files in proptest::collection::btree_set("[a0/.-]{1,4}", 1..12),
        place in proptest::option::of("[a0/.*-]{0,4}"),
        below in proptest::option::of("[a0/]{0,2}"),
        whole in any::<bool>(),
    ) {
        let tensors: &[Named<'_>] = &[("v", Some(0)), ("w", whole.then_some(0)), ("w", None)];
        let files: Vec<(&str, &[Named<'_>])> = files.iter().map(|path| (path.as_str(), tensors)).collect();
        let tree = manifest(&files);
        let globals = globals(&tree);
        let plain = TensorSelector::named("w");
        let selector = place.as_deref().map_or_else(|| Ok(plain.clone()), |place| plain.clone().in_path(place));
        let wild = TensorSelector::new("[w]").unwrap();
        let looking = place.as_deref().map_or_else(|| Ok(wild.clone()), |place| wild.clone().in_path(place));
        let found = |selector: TensorSelector| {
            let below = below.as_deref().map(str::as_bytes);
            Index::default().matching(&globals, &selector, &"n".parse().unwrap(), below).unwrap_or_default()
        };
        prop_assert_eq!(selector.map(found).ok(), looking.map(found).ok());
    }

    #[test]
    fn any_text_is_a_selector_or_a_clear_error(text in "[a:\\[\\]{}*?,0-9\\\\ -]{0,12}") {
        if let Err(error) = text.parse::<TensorSelector>() {
            prop_assert_eq!(error.kind(), ErrorKind::Usage);
        }
    }
}
