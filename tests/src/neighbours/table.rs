//! The matrix as a table, printed row by row.

use super::{Cell, End, Left, Raw};

/// Prints rows as they come.
#[derive(Debug)]
pub struct Table {
    is_quiet: bool,
    has_head: bool,
}

impl Table {
    /// A table; a quiet one prints nothing.
    #[must_use]
    pub const fn new(is_quiet: bool) -> Self {
        Self { is_quiet, has_head: false }
    }

    fn row(&mut self, columns: [&str; 9]) {
        let [attack, over, victim, before, worst, beside, latest, share, verdict] = columns;
        if !self.is_quiet {
            println!(
                "{attack:<17}{over:<6}{victim:<13}{before:>10}{worst:>9}{beside:>10}{latest:>9}\
                 {share:>7}  {verdict}"
            );
        }
    }

    fn head(&mut self) {
        if !std::mem::replace(&mut self.has_head, true) {
            self.row(["", "", "", "beside", "a good", "beside", "the", "", ""]);
            self.row(["", "", "", "neighbour", "one", "attacker", "", "", ""]);
            self.row([
                "attack", "over", "victim", "ops/s", "worst ms", "ops/s", "worst ms", "share", "",
            ]);
        }
    }

    /// The shares that a plain disk leaves.
    pub fn raw(&self, raw: &Raw) {
        if !self.is_quiet {
            println!(
                "A plain file beside 16 plain writes of 256 KiB keeps of its throughput: read \
                 {:.3}, write {:.3}, write and fdatasync {:.3}",
                raw.read, raw.write, raw.flush
            );
        }
    }

    /// A victim's row.
    pub fn cell(&mut self, cell: &Cell) {
        self.head();
        let (good, bad) = (&cell.beside_neighbour, &cell.beside_attack);
        let verdict = match (cell.misses.is_empty(), cell.attempts) {
            (true, 1) => "ok".to_owned(),
            (true, attempts) => format!("ok, attempt {attempts}"),
            (false, _) => format!("MISSED: {}", cell.misses.join("; ")),
        };
        self.row([
            &cell.attack.name(),
            cell.transport.name(),
            &cell.victim.name(),
            &format!("{:.0}", good.per_second),
            &format!("{:.1}", good.worst_ms),
            &format!("{:.0}", bad.per_second),
            &format!("{:.1}", bad.worst_ms),
            &format!("{:.2}", cell.share()),
            &verdict,
        ]);
    }

    /// The row of what is left of an attacker.
    pub fn left(&mut self, left: &Left) {
        self.head();
        let did = left.did;
        let verdict = match (&left.left, left.free_after_ms) {
            (Some(what), _) => format!("MISSED: after 1 s: {what}"),
            (None, after) => format!(
                "ok, all free after {:.0} ms; {} connections, {} refused, {} requests, {} answered",
                after.unwrap_or(0.0),
                did.connections,
                did.refused,
                did.requests_sent,
                did.requests_answered
            ),
        };
        let (attack, over) = (left.attack.name(), left.transport.name());
        self.row([&attack, over, "left", "", "", "", "", "", &verdict]);
    }

    /// The row of an end of the daemon or of an attachment.
    pub fn end(&mut self, end: &End) {
        self.head();
        let verdict = match &end.problem {
            Some(problem) => format!("MISSED: {problem}"),
            None => format!("ok, {:.1} s", end.seconds),
        };
        self.row([end.what, "", "", "", "", "", "", "", &verdict]);
    }
}
