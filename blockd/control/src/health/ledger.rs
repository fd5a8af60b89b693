//! The problems of pools and volumes, each with its time of begin. A cause begins when a look finds
//! it, and ends when no look has found it for its hold time: a problem that comes and goes more
//! often than that is one cause. The clock comes from outside.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use blockd_media::finding::{Code, Finding, Severity};

/// Causes that are kept of one pool or volume: one of each code for a few devices. Of more, the
/// worst.
pub const MAX_CAUSES: usize = 32;
/// How often in a row the beginning of a cause may be reported.
const BURST: u32 = 3;

/// A pool, or a volume of it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Subject {
    /// The pool's name.
    pub pool: String,
    /// The volume's name; empty for the pool itself.
    pub volume: String,
}

/// The time of a look.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moment {
    /// By a clock that never jumps: waits are measured by it.
    pub ns: u64,
    /// By the host's clock, since 1970: this time is shown.
    pub unix_ms: i64,
}

/// How long things take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// A state that is over has to stay so for this long.
    pub hold_ns: u64,
    /// IO errors have to stay away for this long.
    pub errors_hold_ns: u64,
    /// After three times in a row, the beginning of a cause is reported once in this time.
    pub notify_ns: u64,
}

impl Rules {
    fn hold_ns(&self, code: Code) -> u64 {
        if ends_by_time(code) { self.errors_hold_ns } else { self.hold_ns }
    }
}

/// Whether nothing but time, or an acknowledgement, ends causes of this code: counted errors stay
/// counted.
#[must_use]
pub const fn ends_by_time(code: Code) -> bool {
    matches!(code, Code::IoErrors | Code::DeviceErrors)
}

/// Something that is wrong, and since when.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cause {
    /// As it was last found.
    pub finding: Finding,
    /// When it began, in milliseconds since 1970.
    pub first_seen: i64,
    /// When it was last looked at.
    pub last_probe: i64,
    /// When it began, or last changed its severity.
    pub last_transition: i64,
    /// When it was last found, by the clock that never jumps.
    found_ns: u64,
    /// Whether its beginning was reported with its present severity.
    notified: bool,
}

/// A change to report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Notice {
    /// A cause has begun, or become worse.
    Abnormal(Subject, Finding),
    /// All reported causes of a pool or volume have ended.
    Recovered(Subject, Episode),
}

/// The time from the first cause to the end of the last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Episode {
    /// When the first of them began, in milliseconds since 1970.
    pub since: i64,
    /// The codes of the episode, without repetition, in the order in which they were found.
    pub codes: Vec<Code>,
}

/// How one pool or volume is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct State {
    causes: BTreeMap<(Code, String), Cause>,
    /// When it was last looked at, in milliseconds since 1970.
    pub last_probe: i64,
    /// When it last became healthy or abnormal; 0 when it has always been healthy.
    pub last_transition: i64,
    /// When it was last looked at, by the clock that never jumps.
    looked_ns: u64,
    episode: Option<Episode>,
    /// Whether a cause of the episode was reported, so that its end is reported, too.
    notified: bool,
}

impl State {
    /// The causes to report. Waiting writes are a metric as well, and both have to agree: that
    /// cause is reported only if the last look found it. Held, it only delays the event of its end.
    fn reported(&self) -> impl Iterator<Item = &Cause> {
        let is_over = |cause: &Cause| {
            cause.finding.code == Code::WritesBlocked && cause.found_ns != self.looked_ns
        };
        self.causes.values().filter(move |cause| !is_over(cause))
    }

    /// The causes, the worst first.
    #[must_use]
    pub fn causes(&self) -> Vec<&Cause> {
        let mut causes: Vec<&Cause> = self.reported().collect();
        causes.sort_by_key(|one| (Reverse(one.finding.severity), one.finding.code));
        causes
    }

    /// Whether there is a cause of this code about this device.
    #[must_use]
    pub fn has(&self, code: Code, device: &str) -> bool {
        self.causes.keys().any(|(one, of)| *one == code && of == device)
    }

    /// The severity of the worst cause; `None` when it is healthy.
    #[must_use]
    pub fn severity(&self) -> Option<Severity> {
        self.reported().map(|one| one.finding.severity).max()
    }
}

/// The number of recent reports of a cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Budget {
    left: u32,
    refilled_ns: u64,
}

/// The causes whose reports are counted separately.
type Key = (Subject, Code, String);

/// How all pools and volumes are.
#[derive(Clone, Debug)]
pub struct Ledger {
    rules: Rules,
    states: BTreeMap<Subject, State>,
    /// Of causes that began lately.
    budgets: BTreeMap<Key, Budget>,
}

impl Ledger {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self { rules, states: BTreeMap::new(), budgets: BTreeMap::new() }
    }

    /// How a pool or volume is, if it was ever looked at.
    #[must_use]
    pub fn state(&self, subject: &Subject) -> Option<&State> {
        self.states.get(subject)
    }

    /// The volumes of a pool with causes that have not ended yet, and an empty name if the pool
    /// itself has such a cause: a health check has to examine these again.
    pub fn unsettled(&self, pool: &str) -> impl Iterator<Item = &str> {
        let first = Subject { pool: pool.to_owned(), volume: String::new() };
        let states = self.states.range(first..);
        let mine = states.take_while(move |(subject, _)| subject.pool == *pool);
        let open = mine.filter(|(_, state)| !state.causes.is_empty() || state.episode.is_some());
        open.map(|(subject, _)| subject.volume.as_str())
    }

    /// Takes what a look has found of one pool or volume, which is all that is wrong with it.
    pub fn look(
        &mut self,
        at: Moment,
        subject: &Subject,
        found: Vec<Finding>,
        notices: &mut Vec<Notice>,
    ) {
        let state = self.states.entry(subject.clone()).or_default();
        (state.last_probe, state.looked_ns) = (at.unix_ms, at.ns);
        for finding in worst_of(found) {
            note(state, finding, at);
        }
        let rules = self.rules;
        state.causes.retain(|(code, _), cause| {
            cause.last_probe = at.unix_ms;
            cause.found_ns == at.ns || at.ns - cause.found_ns.min(at.ns) < rules.hold_ns(*code)
        });
        while state.causes.len() > MAX_CAUSES {
            let least = state.causes.iter().min_by_key(|(_, one)| one.finding.severity);
            let Some(least) = least.map(|(key, _)| key.clone()) else { break };
            state.causes.remove(&least);
        }
        self.notify(at, subject, notices);
    }

    /// Ends causes that only time would end. True if there were any.
    pub fn acknowledge(
        &mut self,
        at: Moment,
        subject: &Subject,
        notices: &mut Vec<Notice>,
    ) -> bool {
        let Some(state) = self.states.get_mut(subject) else { return false };
        let before = state.causes.len();
        state.causes.retain(|(code, _), _| !ends_by_time(*code));
        let changed = state.causes.len() < before;
        if changed {
            self.notify(at, subject, notices);
        }
        changed
    }

    /// Keeps the states of a pool that has another name now, and of its volumes.
    pub fn rename_pool(&mut self, former: &str, name: &str) {
        let renamed = |mut subject: Subject| {
            if subject.pool == *former {
                name.clone_into(&mut subject.pool);
            }
            subject
        };
        let states = std::mem::take(&mut self.states).into_iter();
        self.states = states.map(|(subject, state)| (renamed(subject), state)).collect();
        let budgets = std::mem::take(&mut self.budgets).into_iter();
        let budgets = budgets
            .map(|((subject, code, object), budget)| ((renamed(subject), code, object), budget));
        self.budgets = budgets.collect();
    }

    /// Forgets pools and volumes that are gone: they are not reported any more.
    pub fn retain(&mut self, is_there: impl Fn(&Subject) -> bool) {
        self.states.retain(|subject, _| is_there(subject));
        self.budgets.retain(|(subject, _, _), _| is_there(subject));
    }

    fn notify(&mut self, at: Moment, subject: &Subject, notices: &mut Vec<Notice>) {
        let rules = self.rules;
        // A budget that is full again need not be remembered.
        self.budgets.retain(|_, budget| {
            let passed = at.ns.saturating_sub(budget.refilled_ns);
            passed < rules.notify_ns.saturating_mul(BURST.into())
        });
        let Some(state) = self.states.get_mut(subject) else { return };
        for ((code, device), cause) in state.causes.iter_mut().filter(|(_, one)| !one.notified) {
            let key = (subject.clone(), *code, device.clone());
            if may_notify(&mut self.budgets, key, at.ns, rules.notify_ns) {
                cause.notified = true;
                state.notified = true;
                notices.push(Notice::Abnormal(subject.clone(), cause.finding.clone()));
            }
        }
        if state.causes.is_empty()
            && let Some(episode) = state.episode.take()
        {
            state.last_transition = at.unix_ms;
            if std::mem::take(&mut state.notified) {
                notices.push(Notice::Recovered(subject.clone(), episode));
            }
        }
    }
}

/// A cause was found, for the first time or again.
fn note(state: &mut State, finding: Finding, at: Moment) {
    let episode = state.episode.get_or_insert_with(|| {
        state.last_transition = at.unix_ms;
        Episode { since: at.unix_ms, codes: Vec::new() }
    });
    if !episode.codes.contains(&finding.code) {
        episode.codes.push(finding.code);
    }
    let key = (finding.code, finding.device.clone());
    match state.causes.get_mut(&key) {
        Some(cause) => {
            if cause.finding.severity != finding.severity {
                cause.last_transition = at.unix_ms;
                cause.notified &= finding.severity < cause.finding.severity;
            }
            cause.finding = finding;
            cause.found_ns = at.ns;
        }
        None => {
            let now = at.unix_ms;
            state.causes.insert(
                key,
                Cause {
                    finding,
                    first_seen: now,
                    last_probe: now,
                    last_transition: now,
                    found_ns: at.ns,
                    notified: false,
                },
            );
        }
    }
}

/// Limits what one look has found to the worst, where there is too much.
fn worst_of(mut found: Vec<Finding>) -> Vec<Finding> {
    if found.len() > MAX_CAUSES {
        found.sort_by_key(|one| (Reverse(one.severity), one.code));
        found.truncate(MAX_CAUSES);
    }
    found
}

fn may_notify(budgets: &mut BTreeMap<Key, Budget>, key: Key, now: u64, notify_ns: u64) -> bool {
    let full = Budget { left: BURST, refilled_ns: now };
    let budget = budgets.entry(key).or_insert(full);
    if let Some(more) = now.saturating_sub(budget.refilled_ns).checked_div(notify_ns)
        && more > 0
    {
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        budget.left = budget.left.saturating_add(more).min(BURST);
        budget.refilled_ns = now;
    }
    let may = budget.left > 0;
    budget.left -= u32::from(may);
    may
}
