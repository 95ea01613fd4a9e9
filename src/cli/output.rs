//! Output: text or one JSON object on standard output, errors on standard error.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use serde_json::ser::Formatter;

use crate::error::{Error, Result};

/// Output of a command. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Output {
    json: bool,
    quiet: bool,
    /// True once the reader of standard output has gone.
    broken: Arc<AtomicBool>,
}

impl Output {
    pub(super) fn new(json: bool, quiet: bool) -> Self {
        Self { json, quiet, broken: Arc::default() }
    }

    /// The same, but results are JSON.
    #[cfg(feature = "agent")]
    pub(super) fn as_json(&self) -> Self {
        Self { json: true, ..self.clone() }
    }

    /// Prints a result: as JSON, or as the text that `human` makes of it.
    pub(super) fn answer<T: Serialize>(&self, value: &T, human: impl FnOnce(&T, Colors) -> String) -> Result<()> {
        self.stream(value, |value, colors, out| out.write_all(human(value, colors).as_bytes()))
    }

    /// Prints a result that may be too long for memory: as JSON, or as the text that `human` writes.
    pub(super) fn stream<T: Serialize>(
        &self,
        value: &T,
        human: impl FnOnce(&T, Colors, &mut dyn Write) -> io::Result<()>,
    ) -> Result<()> {
        let mut out = BufWriter::new(self.raw()?);
        let written = if self.json {
            write_json(&mut out, value).map_err(io::Error::from).and_then(|()| out.write_all(b"\n"))
        } else {
            human(value, Colors::of(&io::stdout()), &mut Harmless(&mut out))
        };
        written.and_then(|()| out.flush()).map_err(Error::standard_output)
    }

    /// Prints a report: as [`Output::answer`], but `--quiet` suppresses the text.
    pub(super) fn report<T: Serialize>(&self, value: &T, human: impl FnOnce(&T, Colors) -> String) -> Result<()> {
        if self.quiet && !self.json {
            return Ok(());
        }
        self.answer(value, human)
            .map_err(|error| error.help("the command has done its work: only its report could not be written"))
    }

    /// Prints a result; that of a dry run even with `--quiet`, as it is all that was asked for.
    pub(super) fn outcome<T: Serialize>(
        &self,
        dry_run: bool,
        value: &T,
        human: impl FnOnce(&T, Colors) -> String,
    ) -> Result<()> {
        if dry_run { self.answer(value, human) } else { self.report(value, human) }
    }

    /// One of several things that happen while a command goes on: as a line of JSON, or as a remark.
    pub(super) fn event<T: Serialize>(&self, value: &T, human: impl FnOnce(&T) -> String) -> Result<()> {
        if self.json {
            return self.answer(value, |_, _| String::new());
        }
        self.remark(human(value).trim_end());
        Ok(())
    }

    /// True if it is read by a program.
    #[cfg(feature = "agent")]
    pub(super) fn is_json(&self) -> bool {
        self.json
    }

    /// Bytes as they are, on standard output.
    pub(super) fn print(&self, bytes: &[u8]) -> Result<()> {
        let mut out = self.raw()?;
        out.write_all(bytes).map_err(Error::standard_output)
    }

    /// Standard output for bytes as they are, without a buffer.
    pub(super) fn raw(&self) -> Result<Raw> {
        let owned = io::stdout().as_fd().try_clone_to_owned();
        let file = owned.map_err(|source| Error::other("standard output is not open").source(source))?;
        Ok(Raw { file: file.into(), broken: Arc::clone(&self.broken) })
    }

    /// A remark on standard error, unless it must be silent or read by a program.
    pub(super) fn remark(&self, text: &str) {
        if !self.quiet && !self.json {
            // Ignored: standard error itself is gone.
            let _ = writeln!(io::stderr(), "{}", harmless(text));
        }
    }

    /// The error that ends the command, on standard error.
    pub(super) fn error(&self, error: &Error) {
        let stderr = io::stderr();
        let text = if self.json { error_json(error) } else { error_text(error, Colors::of(&stderr)) };
        let _ = writeln!(&stderr, "{}", text.trim_end());
    }

    /// Whether the reader of standard output has gone, which is no error: `towline ls | head -1`.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }
}

/// Standard output; remembers when its reader has gone.
#[derive(Debug)]
pub(super) struct Raw {
    file: File,
    broken: Arc<AtomicBool>,
}

impl Raw {
    fn seen<T>(&self, result: io::Result<T>) -> io::Result<T> {
        if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
            self.broken.store(true, Ordering::Relaxed);
        }
        result
    }
}

impl Write for Raw {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes);
        self.seen(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.file.flush();
        self.seen(flushed)
    }
}

/// Colours, where they can be seen (<https://no-color.org>).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Colors(bool);

impl Colors {
    /// Without colours.
    #[cfg(test)]
    pub(super) const PLAIN: Self = Self(false);

    fn of(stream: &impl IsTerminal) -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        Self(stream.is_terminal() && !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb"))
    }

    pub(super) fn bad(self, text: &str) -> String {
        self.sgr("1;31", text)
    }

    pub(super) fn good(self, text: &str) -> String {
        self.sgr("32", text)
    }

    pub(super) fn warn(self, text: &str) -> String {
        self.sgr("33", text)
    }

    pub(super) fn faint(self, text: &str) -> String {
        self.sgr("2", text)
    }

    fn sgr(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Codes of [`Colors`].
const COLORS: [&str; 5] = ["\x1b[1;31m", "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"];

/// Text for a terminal, as [`harmless`] makes it. Each write is of whole characters and codes.
struct Harmless<W>(W);

impl<W: Write> Write for Harmless<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_all(harmless(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// `text` of several lines as [`printable`], except for the ends of lines, and colours. What comes from elsewhere was made printable
/// before: a field that was forgotten must not reach the terminal as it is.
pub(super) fn harmless(text: &str) -> Cow<'_, str> {
    let is_bad = |c: char| (c.is_control() && c != '\n') || is_format(c);
    let mut rest = text;
    let mut shown = String::new();
    while let Some(at) = rest.find(is_bad) {
        let (plain, from) = rest.split_at(at);
        shown.push_str(plain);
        rest = match COLORS.iter().find(|code| from.starts_with(**code)) {
            Some(code) => {
                shown.push_str(code);
                &from[code.len()..]
            }
            None => {
                let mut after = from.chars();
                shown.extend(after.next().into_iter().flat_map(char::escape_default));
                after.as_str()
            }
        };
    }
    if shown.is_empty() {
        return Cow::Borrowed(rest);
    }
    shown.push_str(rest);
    Cow::Owned(shown)
}

/// `error: WHAT`, then its causes, then what to do.
fn error_text(error: &Error, paint: Colors) -> String {
    let mut text = format!("{} {}\n", paint.bad("error:"), printable(&error.to_string()));
    for cause in error.causes() {
        let mut lines = cause.lines().map(printable);
        let _ = writeln!(text, "  cause: {}", lines.next().unwrap_or_default());
        for line in lines {
            let _ = writeln!(text, "         {line}");
        }
    }
    if let Some(help) = error.help_text() {
        let _ = writeln!(text, "  {} {}", paint.good("help:"), printable(help));
    }
    text
}

/// `{"error": {...}}` on one line.
fn error_json(error: &Error) -> String {
    let mut json = Vec::new();
    // Ignored: writing to memory does not fail, and an error is a plain structure.
    let _ = write_json(&mut json, &serde_json::json!({ "error": error }));
    String::from_utf8_lossy(&json).into_owned()
}

/// Writes `value` as one line of JSON that a terminal does not obey.
fn write_json(out: impl Write, value: &impl Serialize) -> serde_json::Result<()> {
    value.serialize(&mut serde_json::Serializer::with_formatter(out, Printable))
}

/// Compact JSON with the characters escaped that JSON leaves as they are and a terminal obeys: those of [`printable`].
struct Printable;

impl Formatter for Printable {
    fn write_string_fragment<W: Write + ?Sized>(&mut self, out: &mut W, mut fragment: &str) -> io::Result<()> {
        while let Some(at) = fragment.find(is_obeyed) {
            let (plain, rest) = fragment.split_at(at);
            let mut rest = rest.chars();
            out.write_all(plain.as_bytes())?;
            // All of them have four digits.
            rest.next().map_or(Ok(()), |c| write!(out, "\\u{:04x}", u32::from(c)))?;
            fragment = rest.as_str();
        }
        out.write_all(fragment.as_bytes())
    }
}

/// True if a terminal may obey `c`, and JSON need not escape it.
fn is_obeyed(c: char) -> bool {
    !c.is_ascii() && (c.is_control() || is_format(c)) || c == '\u{7f}'
}

/// `text` with control characters escaped: names come from anywhere, and a terminal obeys what it is shown.
pub(super) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || is_format(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    shown
}

/// True if `c` is invisible or changes the direction of text: a name with it may look like another one
/// (<https://www.unicode.org/reports/tr36/#Bidirectional_Text_Spoofing>).
const fn is_format(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Widest column that cells are padded to: one long name must not make every line as long.
const PADDED_MAX: usize = 100;

/// Columns under a header, as wide as they need be, up to [`PADDED_MAX`]; columns whose header begins with `>` are set to the right.
pub(super) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut text = Vec::new();
    // Ignored: writing to memory does not fail.
    let _ = write_table(&mut text, header, || rows.iter().cloned());
    String::from_utf8_lossy(&text).into_owned()
}

/// Writes a [`table`] whose rows are made twice, so that they are never in memory together: first for their widths.
pub(super) fn write_table<R: Iterator<Item = Vec<String>>>(
    out: &mut (impl Write + ?Sized),
    header: &[&str],
    rows: impl Fn() -> R,
) -> io::Result<()> {
    let length = |text: &str| text.chars().count();
    let titles: Vec<String> = header.iter().map(|title| title.trim_start_matches('>').to_owned()).collect();
    let mut widths: Vec<usize> = titles.iter().map(|title| length(title)).collect();
    for row in rows() {
        for (width, cell) in widths.iter_mut().zip(&row) {
            *width = length(cell).min(PADDED_MAX).max(*width);
        }
    }
    let line = |cells: &[String]| {
        let mut text = String::new();
        for ((cell, &width), title) in cells.iter().zip(&widths).zip(header) {
            let gap = if text.is_empty() { "" } else { "  " };
            let _ = if title.starts_with('>') {
                write!(text, "{gap}{cell:>width$}")
            } else {
                write!(text, "{gap}{cell:<width$}")
            };
        }
        format!("{}\n", text.trim_end())
    };
    if titles.iter().any(|title| !title.is_empty()) {
        out.write_all(line(&titles).as_bytes())?;
    }
    rows().try_for_each(|row| out.write_all(line(&row).as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost() -> Error {
        let disk = io::Error::other("disk is\non fire");
        Error::damaged("pack \x1b[2J").at("pack/A").help("towline verify --repair").source(disk)
    }

    #[test]
    fn one_long_cell_makes_no_other_line_long() {
        let rows: Vec<Vec<String>> =
            ["x".repeat(65_000), "short".to_owned()].map(|name| vec![name, "F32".to_owned()]).to_vec();
        let text = table(&["name", "type"], &rows);
        let lens: Vec<usize> = text.lines().map(str::len).collect();
        assert_eq!(lens, [106, 65_005, 105]);
    }

    #[test]
    fn an_error_is_what_then_causes_then_the_cure() {
        let expected =
            "error: pack \\u{1b}[2J at pack/A\n  cause: disk is\n         on fire\n  help: towline verify --repair\n";
        assert_eq!(error_text(&lost(), Colors::PLAIN), expected);
        assert!(error_text(&lost(), Colors(true)).starts_with("\x1b[1;31merror:\x1b[0m "));
    }

    #[test]
    fn text_reaches_the_terminal_without_control_characters_but_with_colours() {
        let coloured = format!("{} and {}\n\u{e9}\u{1f600}", Colors(true).bad("bad"), Colors(true).faint("faint"));
        assert_eq!(harmless(&coloured), coloured);
        let mut out = Vec::new();
        let mut writer = Harmless(&mut out);
        let started = "\x1b]0;title\x07\x1b[2J";
        writeln!(writer, "since {started}: {}", Colors(true).good("run\u{202e}ning\x1b[31m")).unwrap();
        let expected = "since \\u{1b}]0;title\\u{7}\\u{1b}[2J: \x1b[32mrun\\u{202e}ning\\u{1b}[31m\x1b[0m\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn a_json_error_is_one_object_on_one_line() {
        let text = error_json(&lost());
        assert!(!text.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["error"]["kind"], "damaged");
        assert_eq!(value["error"]["place"], "pack/A");
        assert_eq!(value["error"]["help"], "towline verify --repair");
        assert_eq!(value["error"]["causes"], serde_json::json!(["disk is\non fire"]));
    }

    #[test]
    fn json_has_no_character_that_a_terminal_obeys_and_means_the_same() {
        let text = "\u{7f}\u{85}\u{9b}31mred\u{202e}\u{1b}[0m \u{e9}\u{1f600}\n";
        let mut json = Vec::new();
        write_json(&mut json, &text).unwrap();
        let json = String::from_utf8(json).unwrap();
        assert!(!json.contains(|c: char| c.is_control() || is_format(c)), "{json:?}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        assert!(json.contains("\u{e9}\u{1f600}") && json.contains("\\u009b"), "{json}");
    }

    #[test]
    fn a_table_is_aligned_without_trailing_blanks() {
        let rows = [vec!["a".into(), "1".into(), "x".into()], vec!["bcd".into(), "1000".into(), String::new()]];
        assert_eq!(table(&["NAME", ">SIZE", "WHAT"], &rows), "NAME  SIZE  WHAT\na        1  x\nbcd   1000\n");
        assert_eq!(table(&["", ">", ""], &rows), "a       1  x\nbcd  1000\n");
        assert_eq!(table(&["NAME"], &[]), "NAME\n");
    }
}
