//! A line on the terminal that shows how far an operation is.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::task::JoinHandle;

use crate::progress::{Progress, Snapshot};
use crate::size;

/// Interval of drawing.
const EVERY: Duration = Duration::from_millis(100);
/// The total is known.
const MEASURED: &str = "{prefix:10} [{bar:30}] {msg}";
/// It is not, yet.
const OPEN: &str = "{prefix:10} {spinner} {msg}";

/// Draws a [`Progress`] on standard error until it is dropped, and then takes the line away.
#[derive(Debug)]
pub(super) struct Line {
    bar: ProgressBar,
    drawing: JoinHandle<()>,
}

impl Line {
    /// Begins to draw; nothing is seen where standard error is no terminal. Within a runtime.
    pub(super) fn draw(progress: Progress) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_style(style(OPEN));
        let drawn = bar.clone();
        let drawing = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(EVERY);
            let mut shown = ProgressState::default();
            // The first tick comes at once: what ends within one interval draws nothing.
            ticks.tick().await;
            loop {
                ticks.tick().await;
                shown.update(&drawn, progress.snapshot());
            }
        });
        Self { bar, drawing }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.drawing.abort();
        self.bar.finish_and_clear();
    }
}

/// Current content of the line.
#[derive(Debug, Default)]
struct ProgressState {
    phase: &'static str,
    measured: bool,
    rate: Rate,
}

impl ProgressState {
    fn update(&mut self, bar: &ProgressBar, now: Snapshot) {
        if bar.is_finished() {
            return;
        }
        if self.phase != now.phase {
            (self.phase, self.rate) = (now.phase, Rate::default());
            bar.set_prefix(now.phase);
        }
        let measured = now.total > 0;
        if self.measured != measured {
            self.measured = measured;
            bar.set_style(style(if measured { MEASURED } else { OPEN }));
        }
        self.rate.observe(now.done);
        bar.set_length(now.total.max(now.done));
        bar.set_position(now.done);
        bar.set_message(message(now, self.rate.0));
        bar.tick();
    }
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template);
    style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}

/// Bytes a second, smoothed over some seconds.
#[derive(Debug, Default)]
struct Rate(f64, u64);

impl Rate {
    fn observe(&mut self, done: u64) {
        let now = done.saturating_sub(self.1) as f64 / EVERY.as_secs_f64();
        let weight = if self.1 == 0 { 1.0 } else { 0.05 };
        *self = Self(self.0 + (now - self.0) * weight, done);
    }
}

/// `1.0 GiB of 4.0 GiB, 500.0 MiB/s, 300.0 MiB moved, 6s left`
fn message(now: Snapshot, rate: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a figure for people, saturating")]
    let rate = rate as u64;
    let left = now.total.saturating_sub(now.done).checked_div(rate).filter(|&seconds| seconds > 0);
    let parts = [
        (now.total > 0).then(|| format!(" of {}", size::show(now.total.max(now.done)))),
        (rate > 0).then(|| format!(", {}/s", size::show(rate))),
        (now.moved > 0).then(|| format!(", {} moved", size::show(now.moved))),
        left.map(|seconds| format!(", {} left", humantime::format_duration(Duration::from_secs(seconds)))),
    ];
    parts.into_iter().flatten().fold(size::show(now.done), |text, part| text + &part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_templates_are_sound() {
        assert!([MEASURED, OPEN].iter().all(|template| ProgressStyle::with_template(template).is_ok()));
    }

    #[test]
    fn the_line_says_what_is_known() {
        let at = |total, done, moved| Snapshot { phase: "reading", total, done, moved, ..Snapshot::default() };
        assert_eq!(message(at(0, 1 << 20, 0), 0.0), "1.0 MiB");
        assert_eq!(
            message(at(4 << 20, 1 << 20, 1 << 19), 1_048_576.0),
            "1.0 MiB of 4.0 MiB, 1.0 MiB/s, 512.0 KiB moved, 3s left"
        );
    }
}
