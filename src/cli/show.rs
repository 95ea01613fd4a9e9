//! `towline show`: what a name holds, summed up; or its files and tensors one by one.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::args::Show;
use super::output::{printable, table};
use super::render::{counted, facts, list, ratio};
use super::verbs::Context;
use crate::error::Result;
use crate::ops::{ShownEntry, ShownTensor, TreeSummary};
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
        let is_file = shown.entries.len() == 1 && shown.entries.iter().all(|entry| entry.kind == "file");
        let listing =
            Listing { files: files || what.path.is_some(), tensors: tensors || what.path.is_some() && is_file };
        self.output.answer(&shown, |shown, _| text(shown, listing))?;
        if !listing.files && !listing.tensors {
            self.output.remark(&format!(
                "`towline show {name} --files` lists the files, --tensors the tensors; {name}:PATH shows a part"
            ));
        }
        Ok(())
    }
}

fn text(shown: &TreeSummary, listing: Listing) -> String {
    let mut text = head(shown);
    if listing.files && !shown.entries.is_empty() {
        let rows: Vec<_> = shown.entries.iter().map(entry).collect();
        text += "\n";
        text += &table(&["MODE", ">SIZE", ">STORED", ">CHUNKS", "CUT", "MODIFIED", "PATH"], &rows);
    }
    if listing.tensors && shown.entries.iter().all(|entry| entry.tensors.is_empty()) {
        text += "\nno tensors: no file was recognised as a checkpoint\n";
    }
    for entry in shown.entries.iter().filter(|entry| listing.tensors && !entry.tensors.is_empty()) {
        let _ = writeln!(text, "\n{}:", printable(&entry.path));
        let rows: Vec<_> = entry.tensors.iter().map(tensor).collect();
        text += &table(&["  TENSOR", "DTYPE", "SHAPE", ">SIZE", ">STORED", ">RATIO", "CODEC"], &rows);
    }
    text
}

/// Facts about the whole tree.
fn head(shown: &TreeSummary) -> String {
    let path = shown.path.as_ref().map_or_else(String::new, |path| format!(":{}", printable(path)));
    let mut text = format!(
        "{}{path}\n  saved:    {}\n  size:     {} in {} and {}; {} stored\n",
        shown.name,
        shown.saved,
        show(shown.bytes),
        counted(shown.files, "file"),
        counted(shown.chunks, "chunk"),
        show(shown.stored_bytes),
    );
    if shown.base_bytes > 0 {
        let of = match shown.behind {
            // Chunks that it shares with a step that is stored as differences.
            0 => "which shared chunks are differences to".to_owned(),
            // Chunks of a settled step, which was saved after the key step, are bases, too.
            saves => format!("of steps up to {} before", counted(saves.into(), "save")),
        };
        let _ = writeln!(text, "  bases:    {}, {of}", show(shown.base_bytes));
    }
    let _ = writeln!(text, "  manifest: {}", shown.manifest);
    if shown.facts != StepFacts::default() {
        let _ = writeln!(text, "  facts:    {}", facts(&shown.facts));
    }
    for (key, value) in &shown.labels {
        let _ = writeln!(text, "  label:    {}={}", printable(key), printable(value));
    }
    // A folder does not hold itself.
    let own = shown.path.as_deref().unwrap_or(".");
    let held = |entry: &&ShownEntry| entry.kind != "folder" || entry.path != own;
    let count = |kind: &str| shown.entries.iter().filter(held).filter(|entry| entry.kind == kind).count() as u64;
    let kinds = [("file", count("file")), ("folder", count("folder")), ("link", count("link"))];
    let kinds = kinds.iter().filter(|(kind, count)| *count > 0 || *kind == "file");
    let _ = writeln!(
        text,
        "  holds:    {}",
        kinds.map(|(kind, count)| counted(*count, kind)).collect::<Vec<_>>().join(", ")
    );
    text + &tensors_summed(shown)
}

/// Number of tensors, their types and storage; empty, if there are none.
fn tensors_summed(shown: &TreeSummary) -> String {
    let files = shown.entries.iter().filter(|entry| !entry.tensors.is_empty()).count() as u64;
    let (mut dtypes, mut codecs) = (BTreeMap::new(), BTreeMap::new());
    let (mut count, mut bytes, mut stored) = (0, 0, 0);
    for tensor in shown.entries.iter().flat_map(|entry| &entry.tensors) {
        (count, bytes, stored) = (count + 1, bytes + tensor.bytes, stored + tensor.stored_bytes);
        *dtypes.entry(printable(&tensor.dtype)).or_insert(0_u64) += 1;
        if !tensor.codec.is_empty() {
            *codecs.entry(printable(&tensor.codec)).or_insert(0_u64) += 1;
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

fn entry(entry: &ShownEntry) -> Vec<String> {
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

fn tensor(tensor: &ShownTensor) -> Vec<String> {
    let shape = match (&tensor.whole, &tensor.offsets) {
        (Some(whole), Some(at)) => format!("{} at {} of {}", list(&tensor.shape), list(at), list(whole)),
        _ => list(&tensor.shape),
    };
    vec![
        format!("  {}", printable(&tensor.name)),
        printable(&tensor.dtype),
        shape,
        show(tensor.bytes),
        show(tensor.stored_bytes),
        ratio(tensor.bytes, tensor.stored_bytes),
        tensor.codec.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(base_bytes: u64, behind: u32) -> TreeSummary {
        let tensor = |name: &str, dtype: &str, codec: &str| ShownTensor {
            name: name.into(),
            dtype: dtype.into(),
            shape: vec![2],
            whole: None,
            offsets: None,
            bytes: 2048,
            stored_bytes: 1024,
            codec: codec.into(),
        };
        let file = ShownEntry {
            path: "m.safetensors".into(),
            kind: "file",
            mode: "0644".into(),
            mtime: "then".into(),
            bytes: 6144,
            chunks: 3,
            stored_bytes: 3072,
            cut: Some("tensor"),
            target: None,
            tensors: vec![tensor("a", "BF16", "planes"), tensor("b", "F32", "planes"), tensor("c", "F32", "raw")],
        };
        TreeSummary {
            name: "r/step-1".into(),
            path: None,
            manifest: "00".into(),
            saved: "then".into(),
            bytes: 6144,
            stored_bytes: 3072,
            base_bytes,
            behind,
            files: 1,
            chunks: 3,
            facts: StepFacts::default(),
            labels: BTreeMap::new(),
            entries: vec![file],
        }
    }

    #[test]
    fn it_is_summed_up_unless_a_list_is_asked_for() {
        let of = |files, tensors| text(&shown(0, 0), Listing { files, tensors });
        let short = of(false, false);
        assert!(short.ends_with("  holds:    1 file\n  tensors:  3 tensors in 1 file, 6.0 KiB: 2 F32, 1 BF16\n  stored:   3.0 KiB, 2.00x: 2 planes, 1 raw\n"), "{short}");
        assert!(!short.contains("m.safetensors"));
        assert!(of(true, false).contains("m.safetensors") && !of(true, false).contains("TENSOR"));
        assert!(of(false, true).contains("m.safetensors:\n  TENSOR"));
    }

    #[test]
    fn bases_are_never_zero_saves_before() {
        assert!(head(&shown(1024, 1)).contains("bases:    1.0 KiB, of steps up to 1 save before"));
        let shared = head(&shown(1024, 0));
        assert!(
            shared.contains("bases:    1.0 KiB, which shared chunks are differences to") && !shared.contains("0 saves"),
            "{shared}"
        );
        assert!(!head(&shown(0, 3)).contains("bases"));
    }
}
