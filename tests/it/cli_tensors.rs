//! Tensors on the command line: `tensors` and `restore --tensor`, with the real binary on a directory.

use std::path::Path;

use serde_json::{Value, json};

use crate::cli::{User, has_members};
use crate::data::noise;

/// `ckpt/` with a model, its copy in another type, the parts of two ranks that torch wrote, and a file of something else.
fn trained() -> User {
    let user = User::with_repository();
    let header = r#"{"embed":{"dtype":"BF16","shape":[1024,512],"data_offsets":[0,1048576]},"head.bias":{"dtype":"F32","shape":[3],"data_offsets":[1048576,1048588]},"step":{"dtype":"I64","shape":[],"data_offsets":[1048588,1048596]}}"#;
    let mut model = (header.len() as u64).to_le_bytes().to_vec();
    model.extend(header.as_bytes());
    model.extend(noise(1, 1_048_596));
    user.write("ckpt/model.safetensors", &model);
    user.write("ckpt/README", b"no tensors");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoints");
    for file in [".metadata", "__0_0.distcp", "__1_0.distcp"] {
        user.write(&format!("ckpt/optim/{file}"), &std::fs::read(golden.join("dcp").join(file)).unwrap());
    }
    user.write("ckpt/dtypes.pt", &std::fs::read(golden.join("dtypes.pt")).unwrap());
    user.ok(&["save", "ckpt", "run-7/step-1"]);
    user
}

/// The header of a safetensors file, and its tensors' bytes.
fn header(file: &[u8]) -> (Value, &[u8]) {
    let len = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    (serde_json::from_slice(&file[8..8 + len]).unwrap(), &file[8 + len..])
}

#[test]
fn tensors_are_listed() {
    let user = trained();
    let text =
        user.ok(&["tensors", "run-7@latest", "model.safetensors:*", "optim:model.{rows,scalar}", "optim/:*.rows"]);
    let expected = "TENSOR        DTYPE  SHAPE           SIZE  PARTS  FILE
embed         BF16   [1024, 512]  1.0 MiB      1  model.safetensors
head.bias     F32    [3]             12 B      1  model.safetensors
step          I64    []               8 B      1  model.safetensors
model.rows    F32    [6, 4]          96 B      2  optim
model.scalar  F32    []               4 B      1  optim
";
    assert_eq!(text, expected);
    let listed = user.json(&["tensors", "run-7/step-1"], 0);
    has_members(&listed, "name tensors");
    assert_eq!(listed["name"], "run-7/step-1");
    let rows = listed["tensors"].as_array().unwrap().iter().find(|one| one["name"] == "model.rows").unwrap();
    let expected =
        json!({ "name": "model.rows", "dtype": "F32", "shape": [6, 4], "bytes": 96, "parts": 2, "path": "optim" });
    assert_eq!(*rows, expected);
    assert_eq!(user.fails(&["tensors", "run-7/step-1", "none"], 3)["kind"], "not-found");
    assert_eq!(user.fails(&["tensors", "run-7/step-1", "embed[0:1]"], 2)["kind"], "usage");
    user.ok(&["save", "ckpt/README", "plain"]);
    let none = user.run(&["tensors", "plain"]);
    let remark = "no file was understood as a checkpoint when it was saved\n";
    assert_eq!((none.code, none.out.len(), none.err.as_str()), (Some(0), 0, remark));
}

/// T4: "writes one safetensors file, whole or not at all; an existing file stays (exit 5) unless `--overwrite`."
#[test]
fn tensors_are_restored_into_one_file() {
    let user = trained();
    let (model, embed) = (user.read("ckpt/model.safetensors"), "embed[2:4, 510:]");
    let data = &header(&model).1;
    let line =
        ["restore", "run-7@latest", "out", "--tensor", embed, "--tensor", "model.safetensors:s*", "--tensor", "*rows"];
    let report = user.json(&line, 0);
    has_members(&report, "name file tensors bytes fetched_bytes sources chunks seconds");
    assert_eq!((&report["name"], &report["file"]), (&"run-7/step-1".into(), &"out/tensors.safetensors".into()));
    assert_eq!((&report["tensors"], &report["bytes"]), (&3.into(), &(8 + 8 + 96).into()));
    assert!(report["fetched_bytes"].as_u64().unwrap() < 600_000, "one half of embed: {report}");
    let file = user.read("out/tensors.safetensors");
    let (found, bytes) = header(&file);
    let expected = json!({
        "step": { "dtype": "I64", "shape": [], "data_offsets": [0, 8] },
        "model.rows": { "dtype": "F32", "shape": [6, 4], "data_offsets": [8, 104] },
        "embed": { "dtype": "BF16", "shape": [2, 2], "data_offsets": [104, 112] },
    });
    assert_eq!(found, expected);
    assert_eq!(bytes[..8], data[1_048_588..]);
    let row = |row: usize| &data[row * 1024 + 1020..row * 1024 + 1024];
    assert_eq!(bytes[104..], [row(2), row(3)].concat());

    // What was written is a checkpoint like any other.
    user.ok(&["save", "out", "again"]);
    assert_eq!(user.json(&["tensors", "again"], 0)["tensors"].as_array().unwrap().len(), 3);

    assert_eq!(user.fails(&line, 5)["kind"], "conflict");
    let text = user.ok(&["restore", "run-7/step-1", "out", "--overwrite", "--tensor", "head.bias"]);
    let (first, rest) = text.split_once(", ").unwrap();
    assert_eq!(first, "restored run-7/step-1: 12 B in 1 tensor");
    assert!(rest.ends_with(" in 1 chunk\n  file: out/tensors.safetensors (replaced one that was there)\n"), "{text}");
    assert_eq!(header(&user.read("out/tensors.safetensors")).1, &data[1_048_576..1_048_588]);
    let report = user.json(&["restore", "run-7/step-1", "bias.safetensors", "--tensor", "head.bias"], 0);
    assert_eq!(report["file"], "bias.safetensors");
    assert_eq!(user.read("bias.safetensors"), user.read("out/tensors.safetensors"));
}

/// Four ranks make up the whole, whatever it was saved as.
#[test]
fn shards_make_up_the_whole() {
    let user = trained();
    let (mut embed, mut uneven) = (Vec::new(), Vec::new());
    for (rank, rows) in [2, 2, 1, 0].into_iter().enumerate() {
        let (dest, shard) = (format!("rank-{rank}/"), format!("{rank}/4"));
        user.ok(&["restore", "run-7/step-1", &dest, "--shard", &shard, "--tensor", "embed", "--tensor", "*.uneven"]);
        let file = user.read(&format!("rank-{rank}/tensors.safetensors"));
        let (found, bytes) = header(&file);
        assert_eq!(
            (&found["embed"]["shape"], &found["model.uneven"]["shape"]),
            (&json!([256, 512]), &json!([rows, 3]))
        );
        let at = bytes.len() - 256 * 1024;
        uneven.extend_from_slice(&bytes[..at]);
        embed.extend_from_slice(&bytes[at..]);
    }
    assert!(embed == header(&user.read("ckpt/model.safetensors")).1[..1 << 20]);
    user.ok(&["restore", "run-7/step-1:optim", "whole.safetensors", "--tensor", "model.uneven"]);
    assert_eq!(uneven, header(&user.read("whole.safetensors")).1);
}

/// T2: "both in one restore are exit 2; `PATH:GLOB` selects one." T4: "Types that safetensors lacks [...] are refused
/// by name (exit 1)".
#[test]
fn what_cannot_be_is_refused_before_anything_is_written() {
    let user = trained();
    user.write("ckpt/copy.safetensors", &user.read("ckpt/model.safetensors"));
    user.ok(&["save", "ckpt", "both"]);
    for (args, code, said) in [
        (
            "both out --tensor step",
            2,
            "two files hold a tensor of this name at step: got copy.safetensors, model.safetensors",
        ),
        ("both out --tensor copy*:step --tensor m*:step[:]", 2, "box does not lie in the tensor"),
        (
            "both out --tensor m*:embed[0:1] --tensor m*:embed[1:2]",
            2,
            "a tensor is asked for as two different boxes at embed",
        ),
        ("both out --tensor complex128", 1, "safetensors cannot hold this tensor at complex128: got C128 [3, 5]"),
        ("both out --tensor nothing", 3, "there is no such tensor at both, nothing"),
        ("both:optim out --tensor embed", 3, "there is no such tensor at both, embed"),
        ("both out --tensor m*:embed[0:2000]", 2, "box does not lie in the tensor at both:model.safetensors, embed"),
        ("both out --tensor embed[0:1:2]", 2, ""),
        ("both out --tensor step --delete", 2, ""),
        ("both out --shard 0/2", 2, ""),
        ("both out --tensor embed --shard 2/2", 2, ""),
    ] {
        let line: Vec<&str> = ["restore"].into_iter().chain(args.split(' ')).collect();
        let error = user.fails(&line, code);
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with(said), "{args}: {error}");
        assert!(said.is_empty() || error["help"].is_string(), "{args}: {error}");
    }
    assert!(!user.exists("out"));
    user.ok(&["restore", "both", "out", "--tensor", "copy.safetensors:step"]);
}

#[test]
fn types_of_tensors_command_no_terminal() {
    let user = User::new();
    let header = br#"{"a":{"dtype":"\u001b]52;c;aGk=\u0007","shape":[1],"data_offsets":[0,1]}}"#;
    user.write("ckpt/model.safetensors", &[&(header.len() as u64).to_le_bytes()[..], header, b"x"].concat());
    user.ok(&["save", "ckpt", "run/step-1"]);
    for line in [&["tensors", "run/step-1"][..], &["show", "run/step-1", "--tensors"]] {
        let text = user.ok(line);
        assert!(text.contains("52;c;aGk=") && !text.contains(['\u{1b}', '\u{7}']), "{text:?}");
    }
}
