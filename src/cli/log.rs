//! The log of a command: events on standard error, each one line.

use std::io::{self, IsTerminal as _, Write};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

use super::args::Globals;

/// Starts the log, by `RUST_LOG` or as verbose as the command was asked to be.
pub(super) fn start(globals: &Globals) {
    let level = match globals.verbose {
        0 if globals.quiet || globals.json => "off",
        0 => "towline=warn",
        1 => "towline=info",
        2 => "towline=debug",
        _ => "towline=trace,debug",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let colours = io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_span_events(FmtSpan::CLOSE);
    // It fails only where a subscriber is set already, and then that one serves.
    let _ = log.with_ansi(colours).with_writer(move || Lines { out: io::stderr(), colours }).try_init();
}

/// Writes each event as one line: names and texts of others in it may hold line breaks.
struct Lines<W> {
    out: W,
    /// True if the formatter colours the events.
    colours: bool,
}

impl<W: Write> Write for Lines<W> {
    /// `event` is a whole one, which is how the formatter writes.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let mut line = String::with_capacity(text.len());
        for c in text.strip_suffix('\n').unwrap_or(&text).chars() {
            let is_colour = self.colours && c == '\x1b';
            if c.is_control() && !is_colour { line.extend(c.escape_default()) } else { line.push(c) }
        }
        line.push('\n');
        self.out.write_all(line.as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_it_holds() {
        let written = |colours| {
            let mut lines = Lines { out: Vec::new(), colours };
            let event = b"WARN task failed name=a\nERROR all is lost\x1b[2J\r\n";
            assert_eq!(lines.write(event).unwrap(), event.len());
            String::from_utf8(lines.out).unwrap()
        };
        assert_eq!(written(false), "WARN task failed name=a\\nERROR all is lost\\u{1b}[2J\\r\n");
        assert_eq!(written(true), "WARN task failed name=a\\nERROR all is lost\x1b[2J\\r\n");
    }
}
