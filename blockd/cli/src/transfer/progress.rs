//! A bar on a terminal, nothing elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// How far a transfer is.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

const TEMPLATE: &str =
    "{msg} [{bar:30}] {percent}% {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";

impl Progress {
    /// Shows nothing.
    pub(crate) fn none() -> Self {
        Self(ProgressBar::hidden())
    }

    /// A bar on standard error when that is a terminal.
    pub(crate) fn shown(message: &str, total_bytes: u64, wanted: bool) -> Self {
        if !wanted || !std::io::stderr().is_terminal() {
            return Self::none();
        }
        let bar = ProgressBar::new(total_bytes);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(message.to_owned());
        Self(bar)
    }

    /// Whether there is a bar.
    pub(crate) fn is_shown(&self) -> bool {
        !self.0.is_hidden()
    }

    /// So much more was done.
    pub(crate) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    /// So much was done in all.
    pub(crate) fn set(&self, bytes: u64) {
        self.0.set_position(bytes);
    }

    /// Takes the bar away.
    pub(crate) fn clear(&self) {
        self.0.finish_and_clear();
    }
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
