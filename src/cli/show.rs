//! `towline show`: what a name holds, summed up; or its files and tensors one by one.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;

use super::args::Show;
use super::output::{printable, write_table};
use super::render::{counted, facts, list, ratio};
use super::verbs::Context;
use crate::error::Result;
use crate::ops::{ShownEntry, ShownTensor, ShownTree};
use crate::repository::log::StepFacts;
use crate::size::show;

/// Lists to show besides the sums.
#[derive(Clone, Copy, Debug)]
struct Listing {
    files: bool,
    tensors: bool,
}

impl Context {
    /// Shows what a name, or a file or folder of it, holds.
    pub(super) async fn show(&self, args: Show) -> Result<()> {
        let Show { what, files, tensors } = args;
        let repository = self.open().await?;
        let name = self.resolve(&repository, &what.name).await?;
        let shown = repository.show_part(&name, what.path.as_deref()).await?;
        // A part was asked for: list its contents.
        let is_file = shown.entries().take(2).map(|entry| entry.kind).eq(["file"]);
        let listing =
            Listing { files: files || what.path.is_some(), tensors: tensors || what.path.is_some() && is_file };
        self.output.stream(&shown, |shown, _, out| write_text(out, shown, listing))?;
        if !listing.files && !listing.tensors {
            self.output.remark(&format!(
                "`towline show {name} --files` lists the files, --tensors the tensors; {name}:PATH shows a part"
            ));
        }
        Ok(())
    }
}

fn write_text(out: &mut dyn io::Write, shown: &ShownTree, listing: Listing) -> io::Result<()> {
    out.write_all(head(shown).as_bytes())?;
    if listing.files && shown.entries().next().is_some() {
        out.write_all(b"\n")?;
        let header = ["MODE", ">SIZE", ">STORED", ">CHUNKS", "CUT", "MODIFIED", "PATH"];
        write_table(out, &header, || shown.entries().map(|entry| file(&entry)))?;
    }
    if !listing.tensors {
        return Ok(());
    }
    let mut any = false;
    for entry in shown.entries().filter(|entry| !entry.tensors.is_empty()) {
        any = true;
        writeln!(out, "\n{}:", printable(&entry.path))?;
        let header = ["  TENSOR", "DTYPE", "SHAPE", ">SIZE", ">STORED", ">RATIO", "CODEC"];
        write_table(out, &header, || entry.tensors.iter().map(tensor))?;
    }
    if any { Ok(()) } else { out.write_all(b"\nno tensors: no file was recognised as a checkpoint\n") }
}

/// Facts about the whole tree.
fn head(shown: &ShownTree) -> String {
    let summary = shown.summary();
    let path = summary.path.as_ref().map_or_else(String::new, |path| format!(":{}", printable(path)));
    let mut text = format!(
        "{}{path}\n  saved:    {}\n  size:     {} in {} and {}; {} stored\n",
        summary.name,
        summary.saved,
        show(summary.bytes),
        counted(summary.files, "file"),
        counted(summary.chunks, "chunk"),
        show(summary.stored_bytes),
    );
    if summary.base_bytes > 0 {
        let of = match summary.behind {
            // Chunks that it shares with a step that is stored with bases.
            0 => "which its chunks are decoded from".to_owned(),
            // Chunks of a settled step, which was saved after the key step, are bases, too.
            saves => format!("of steps up to {} before", counted(saves.into(), "save")),
        };
        let _ = writeln!(text, "  bases:    {}, {of}", show(summary.base_bytes));
    }
    let _ = writeln!(text, "  manifest: {}", summary.manifest);
    if summary.facts != StepFacts::default() {
        let _ = writeln!(text, "  facts:    {}", facts(&summary.facts));
    }
    for (key, value) in &summary.labels {
        let _ = writeln!(text, "  label:    {}={}", printable(key), printable(value));
    }
    // A folder does not hold itself.
    let own = summary.path.as_deref().unwrap_or(".");
    let mut kinds = [("file", 0), ("folder", 0), ("link", 0)];
    for entry in shown.entries().filter(|entry| entry.kind != "folder" || entry.path != own) {
        for (_, count) in kinds.iter_mut().filter(|(kind, _)| *kind == entry.kind) {
            *count += 1;
        }
    }
    let kinds = kinds.iter().filter(|(kind, count)| *count > 0 || *kind == "file");
    let kinds: Vec<_> = kinds.map(|(kind, count)| counted(*count, kind)).collect();
    let _ = writeln!(text, "  holds:    {}", kinds.join(", "));
    text + &tensors_summed(shown)
}

/// Number of tensors, their types and storage; empty, if there are none.
fn tensors_summed(shown: &ShownTree) -> String {
    let (mut dtypes, mut codecs) = (BTreeMap::new(), BTreeMap::new());
    let (mut files, mut count, mut bytes, mut stored) = (0, 0, 0, 0);
    for entry in shown.entries().filter(|entry| !entry.tensors.is_empty()) {
        files += 1;
        for tensor in entry.tensors.iter() {
            (count, bytes, stored) = (count + 1, bytes + tensor.bytes, stored + tensor.stored_bytes);
            *dtypes.entry(printable(tensor.dtype)).or_insert(0_u64) += 1;
            if !tensor.codec.is_empty() {
                *codecs.entry(tensor.codec).or_insert(0_u64) += 1;
            }
        }
    }
    if count == 0 {
        return String::new();
    }
    format!(
        "  tensors:  {} in {}, {}: {}\n  stored:   {}, {}: {}\n",
        counted(count, "tensor"),
        counted(files, "file"),
        show(bytes),
        most_first(&dtypes),
        show(stored),
        ratio(bytes, stored),
        most_first(&codecs),
    )
}

/// `300 F32, 20 BF16`
fn most_first(counts: &BTreeMap<String, u64>) -> String {
    let mut counts: Vec<_> = counts.iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    counts.iter().map(|(what, count)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
}

fn file(entry: &ShownEntry<'_>) -> Vec<String> {
    let path = printable(&entry.path);
    let is_file = entry.kind == "file";
    let of_file = |text: String| if is_file { text } else { "-".to_owned() };
    let path = match (&entry.target, entry.kind) {
        (Some(target), _) => format!("{path} -> {}", printable(target)),
        (None, "folder") => format!("{path}/"),
        (None, _) => path,
    };
    vec![
        entry.mode.clone(),
        of_file(show(entry.bytes)),
        of_file(show(entry.stored_bytes)),
        of_file(entry.chunks.to_string()),
        entry.cut.unwrap_or("-").to_owned(),
        entry.mtime.clone(),
        path,
    ]
}

fn tensor(tensor: ShownTensor<'_>) -> Vec<String> {
    let shape = match (tensor.whole, tensor.offsets) {
        (Some(whole), Some(at)) => format!("{} at {} of {}", list(tensor.shape), list(at), list(whole)),
        _ => list(tensor.shape),
    };
    vec![
        format!("  {}", printable(tensor.name)),
        printable(tensor.dtype),
        shape,
        show(tensor.bytes),
        show(tensor.stored_bytes),
        ratio(tensor.bytes, tensor.stored_bytes),
        tensor.codec,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunker::Cut;
    use crate::clock::Timestamp;
    use crate::codec::Codec;
    use crate::format::{Content, EntryKind, Form, Piece, TensorEntry, TreeEntry};
    use crate::repository::travel::tests::{Row, tree};

    /// A file of three tensors, each a chunk of 1,000 bytes stored as 500; with a base of 1,024 bytes or without.
    fn shown(base: bool, behind: u32) -> ShownTree {
        let chunk: Row = (None, 500, 0);
        let mut rows = vec![chunk; 3];
        rows.extend(base.then_some((None, 1024, 0)));
        let mut saved = tree(&rows, 3);
        saved.value.behind = behind;
        for frame in &mut saved.map.frames[..2] {
            frame.codec = Codec::Planes;
        }
        let tensor = |nth: u64, name: &str, dtype: &str| TensorEntry {
            name: name.into(),
            dtype: dtype.into(),
            shape: vec![2],
            range: nth * 1000..(nth + 1) * 1000,
            part: None,
        };
        let tensors = vec![tensor(0, "a", "BF16"), tensor(1, "b", "F32"), tensor(2, "c", "F32")];
        let pieces = vec![Piece { hole: 0, first: 0, count: 3 }];
        let kind = EntryKind::File(Content { size: 3000, cut: Cut::Tensor, pieces, tensors });
        saved.manifest.form = Form::File;
        saved.manifest.entries =
            vec![TreeEntry { path: b"m.safetensors".to_vec(), mode: 0o644, mtime: Timestamp(0), kind }];
        ShownTree::whole(saved)
    }

    #[test]
    fn it_is_summed_up_unless_a_list_is_asked_for() {
        let of = |files, tensors| {
            let mut text = Vec::new();
            write_text(&mut text, &shown(false, 0), Listing { files, tensors }).unwrap();
            String::from_utf8(text).unwrap()
        };
        let short = of(false, false);
        assert!(short.ends_with("  holds:    1 file\n  tensors:  3 tensors in 1 file, 2.9 KiB: 2 F32, 1 BF16\n  stored:   1.5 KiB, 2.00x: 2 planes, 1 raw\n"), "{short}");
        assert!(!short.contains("m.safetensors"));
        assert!(of(true, false).contains("m.safetensors") && !of(true, false).contains("TENSOR"));
        assert!(of(false, true).contains("m.safetensors:\n  TENSOR"));
    }

    #[test]
    fn bases_are_never_zero_saves_before() {
        assert!(head(&shown(true, 1)).contains("bases:    1.0 KiB, of steps up to 1 save before"));
        let shared = head(&shown(true, 0));
        assert!(
            shared.contains("bases:    1.0 KiB, which its chunks are decoded from") && !shared.contains("0 saves"),
            "{shared}"
        );
        assert!(!head(&shown(false, 3)).contains("bases"));
    }
}
