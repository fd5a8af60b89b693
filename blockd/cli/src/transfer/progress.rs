//! A bar or a line on a terminal, nothing elsewhere.

use std::fmt;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{BinaryBytes, ProgressBar, ProgressState, ProgressStyle};

/// How far a transfer is: holes are done at once, and are no part of its rate.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Bytes that were moved.
    data: Arc<AtomicU64>,
}

const TEMPLATE: &str =
    "{msg} [{bar:30}] {percent}% {binary_bytes}/{binary_total_bytes} {data_per_sec} {eta}";

impl Progress {
    /// Shows nothing.
    pub(crate) fn none() -> Self {
        Self { bar: ProgressBar::hidden(), data: Arc::default() }
    }

    /// A bar on standard error when that is a terminal.
    pub(crate) fn shown(message: &str, total_bytes: u64, wanted: bool) -> Self {
        if !wanted || !std::io::stderr().is_terminal() {
            return Self::none();
        }
        let (bar, data) = (ProgressBar::new(total_bytes), Arc::<AtomicU64>::default());
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            let moved = Arc::clone(&data);
            let per_second = move |state: &ProgressState, out: &mut dyn fmt::Write| {
                let rate = rate(moved.load(Ordering::Relaxed), state.elapsed());
                // A bar that can't be written is no fault of the transfer.
                let _ = write!(out, "{}/s", BinaryBytes(rate));
            };
            bar.set_style(style.progress_chars("=> ").with_key("data_per_sec", per_second));
        }
        bar.set_message(message.to_owned());
        Self { bar, data }
    }

    /// Whether there is a bar.
    pub(crate) fn is_shown(&self) -> bool {
        !self.bar.is_hidden()
    }

    /// Counts bytes that were moved.
    pub(crate) fn add(&self, bytes: u64) {
        self.data.fetch_add(bytes, Ordering::Relaxed);
        self.bar.inc(bytes);
    }

    /// Counts bytes that needed not to be moved.
    pub(crate) fn skip(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Sets the bytes that were done in all, where holes are not known.
    pub(crate) fn set(&self, bytes: u64) {
        self.data.store(bytes, Ordering::Relaxed);
        self.bar.set_position(bytes);
    }

    /// Bytes that are done, and those of them that were moved.
    #[cfg(test)]
    pub(super) fn done(&self) -> (u64, u64) {
        (self.bar.position(), self.data.load(Ordering::Relaxed))
    }

    /// Takes the bar away.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// Bytes in a second.
fn rate(bytes: u64, elapsed: Duration) -> u64 {
    let ms = elapsed.as_millis().max(1);
    u64::try_from(u128::from(bytes) * 1000 / ms).unwrap_or(u64::MAX)
}

/// How far something is whose length is known in steps only.
#[derive(Debug)]
pub(crate) struct Steps(ProgressBar);

impl Steps {
    /// A bar on standard error when that is a terminal.
    pub(crate) fn shown(message: &str, wanted: bool) -> Self {
        if !wanted || !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(message.to_owned());
        Self(bar)
    }

    /// Shows that `done` of `of` steps are done.
    pub(crate) fn so_far(&self, done: u64, of: u64) {
        self.0.set_length(of);
        self.0.set_position(done);
    }

    /// The same; `pages` is the progress within one.
    pub(crate) fn at(&self, done: u64, of: u64, pages: u64) {
        self.so_far(done, of);
        self.0.set_message(format!("{pages} pages"));
    }

    /// Takes the bar away.
    pub(crate) fn clear(&self) {
        self.0.finish_and_clear();
    }
}

/// A call that has no answer after this time is said to be waited for.
const SOON: Duration = Duration::from_secs(2);
/// Between two changes of the time that is shown.
const TICK: Duration = Duration::from_millis(500);

/// Awaits the answer of a call. When it takes long, a line on standard error says so, if that is a
/// terminal.
pub(crate) async fn awaited<T>(wanted: bool, call: impl Future<Output = T>) -> T {
    if !wanted || !std::io::stderr().is_terminal() {
        return call.await;
    }
    let mut call = std::pin::pin!(call);
    if let Ok(answer) = tokio::time::timeout(SOON, &mut call).await {
        return answer;
    }
    let line = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} waiting for the daemon: {elapsed}") {
        line.set_style(style);
    }
    line.set_elapsed(SOON);
    line.enable_steady_tick(TICK);
    let answer = call.await;
    line.finish_and_clear();
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_done_and_not_moved() {
        let progress = Progress::none();
        progress.add(3);
        progress.skip(1 << 40);
        assert_eq!(progress.done(), ((1 << 40) + 3, 3));
    }

    #[test]
    fn a_rate_is_that_of_the_data() {
        assert_eq!(rate(1 << 20, Duration::from_millis(500)), 2 << 20);
        assert_eq!(rate(7, Duration::ZERO), 7000);
        assert_eq!(rate(u64::MAX, Duration::ZERO), u64::MAX);
    }
}
