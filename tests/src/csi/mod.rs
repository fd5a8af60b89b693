//! A conformance suite for drivers of the Container Storage Interface, 1.12.
//!
//! The suite talks to a driver through its socket, so it can be pointed at any. Each case holds one
//! sentence of the specification, or one row of this project's requirements, and is named
//! after it. Capabilities that a driver does not offer are listed and never counted as passed. A
//! case removes the objects that it made; any that are left are counted, and fail it.
//!
//! ```no_run
//! use blockd_tests::csi::{self, Options};
//! let options = Options { endpoint: "unix:///run/csi.sock".to_owned(), ..Options::default() };
//! let report = csi::run(&options).unwrap();
//! report.print(false);
//! assert!(report.is_good());
//! ```

mod case;
mod cases;
mod cx;
mod driver;
pub mod operator;
pub mod rig;

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::clock::Clock;
use serde::Serialize;

use case::Case;

pub use case::NotOffered;
use cx::Cx;
pub use cx::{Answer, block, range, refused};
pub use driver::{Driver, Offers};

/// How a driver is to be examined.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its socket: `unix:///path`.
    pub endpoint: String,
    /// Parameters of each volume that is made.
    pub parameters: HashMap<String, String>,
    /// A mutable parameter that it takes; without one, modifying is hardly looked at.
    pub mutable_parameters: HashMap<String, String>,
    /// The file system of volumes that are mounted.
    pub fs_type: String,
    /// Bytes of a volume.
    pub size: i64,
    /// Nothing is staged, published or mounted.
    pub skip_node: bool,
    /// Only cases that stage or publish something.
    pub only_host: bool,
    /// Where volumes are staged, as the driver's host sees it: this suite runs there.
    pub staging_dir: PathBuf,
    /// Where volumes are published.
    pub target_dir: PathBuf,
    /// Runs the cases of this project's own requirements as well.
    pub rows: bool,
    /// Only cases with this in their name.
    pub only: Option<String>,
    /// How long a call may take.
    pub limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            parameters: HashMap::new(),
            mutable_parameters: HashMap::new(),
            fs_type: "ext4".to_owned(),
            size: 64 << 20,
            skip_node: true,
            only_host: false,
            staging_dir: PathBuf::from("/var/lib/kubelet/plugins/kubernetes.io/csi"),
            target_dir: PathBuf::from("/var/lib/kubelet/pods"),
            rows: false,
            only: None,
            limit: Duration::from_secs(60),
        }
    }
}

/// How a case ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "verdict", content = "why")]
pub enum Verdict {
    Passed,
    Failed(String),
    /// The driver does not have what it is about.
    NotOffered(String),
    /// Not selected: the node's part, or the rows.
    NotRun(String),
}

/// One case of a report.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub name: &'static str,
    #[serde(flatten)]
    pub verdict: Verdict,
    pub millis: u64,
}

/// The results of a run against a driver.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub driver: String,
    pub version: String,
    pub outcomes: Vec<Outcome>,
    /// Volumes, snapshots, mounts and folders that cases left behind.
    pub leaked: Vec<String>,
}

impl Report {
    fn count(&self, is: impl Fn(&Verdict) -> bool) -> usize {
        self.outcomes.iter().filter(|outcome| is(&outcome.verdict)).count()
    }

    #[must_use]
    pub fn cases(&self) -> usize {
        self.outcomes.len()
    }

    #[must_use]
    pub fn passed(&self) -> usize {
        self.count(|verdict| *verdict == Verdict::Passed)
    }

    #[must_use]
    pub fn failed(&self) -> usize {
        self.count(|verdict| matches!(verdict, Verdict::Failed(_)))
    }

    #[must_use]
    pub fn not_offered(&self) -> usize {
        self.count(|verdict| matches!(verdict, Verdict::NotOffered(_)))
    }

    #[must_use]
    pub fn not_run(&self) -> usize {
        self.count(|verdict| matches!(verdict, Verdict::NotRun(_)))
    }

    /// Something passed, nothing failed, nothing is left.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.passed() > 0 && self.failed() == 0 && self.leaked.is_empty()
    }

    /// One line for each case that did not pass, or for each, and the sums.
    pub fn print(&self, all: bool) {
        for Outcome { name, verdict, millis } in &self.outcomes {
            match verdict {
                Verdict::Passed if all => println!("ok          {name}, {millis} ms"),
                Verdict::Passed => {}
                Verdict::Failed(why) => println!("FAILED      {name}: {why}"),
                Verdict::NotOffered(why) => println!("not offered {name}: {why}"),
                Verdict::NotRun(why) if all => println!("not run     {name}: {why}"),
                Verdict::NotRun(_) => {}
            }
        }
        for leaked in &self.leaked {
            println!("leaked      {leaked}");
        }
        println!(
            "{} {}: {} cases: {} passed, {} failed, {} not offered, {} not run; {} leaked",
            self.driver,
            self.version,
            self.cases(),
            self.passed(),
            self.failed(),
            self.not_offered(),
            self.not_run(),
            self.leaked.len()
        );
    }
}

/// Names of all cases, with the file of each.
#[must_use]
pub fn list() -> Vec<(&'static str, &'static str)> {
    cases::all().map(|case| (case.name, case.file)).collect()
}

/// Examines a driver.
///
/// # Errors
/// When it can't be reached, or does not report its identity. A case that fails is part of the
/// report.
pub fn run(options: &Options) -> Result<Report> {
    let driver = Driver::connect(&options.endpoint, options.limit)?;
    let offers = driver.offers().clone();
    let mut report = Report {
        driver: offers.name.clone(),
        version: offers.version.clone(),
        outcomes: Vec::new(),
        leaked: Vec::new(),
    };
    let wanted = |case: &&Case| options.only.as_ref().is_none_or(|only| case.name.contains(only));
    for case in cases::all().filter(wanted) {
        let start = Clock::start();
        let verdict = match case.reason_not_to_run(&offers, options) {
            Some(verdict) => verdict,
            None => run_case(case, &driver, options, &mut report.leaked)?,
        };
        let millis = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        report.outcomes.push(Outcome { name: case.name, verdict, millis });
    }
    Ok(report)
}

fn run_case(
    case: &Case,
    driver: &Driver,
    options: &Options,
    leaked: &mut Vec<String>,
) -> Result<Verdict> {
    let before = there(driver, options).context("what was there before a case")?;
    let mut cx = Cx::new(driver, options, case.name);
    let result = (case.run)(&mut cx);
    let cleaned = cx.clean();
    let after = there(driver, options).context("what is there after a case")?;
    let left: Vec<String> = after.difference(&before).cloned().collect();
    let verdict = match result.and(cleaned) {
        Ok(()) if left.is_empty() => Verdict::Passed,
        Ok(()) => Verdict::Failed(format!("it left {} behind", left.join(", "))),
        Err(error) => match error.downcast_ref::<NotOffered>() {
            Some(NotOffered(what)) => Verdict::NotOffered(what.clone()),
            None => Verdict::Failed(format!("{error:#}")),
        },
    };
    leaked.extend(left.into_iter().map(|what| format!("{what} by {}", case.name)));
    Ok(verdict)
}

/// All that a case could leave behind, as far as it can be seen.
fn there(driver: &Driver, options: &Options) -> Result<BTreeSet<String>> {
    let mut all = driver.everything()?;
    if !options.skip_node {
        all.extend(cx::below(&options.staging_dir)?);
        all.extend(cx::below(&options.target_dir)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_stands_for_two_cases() {
        let names: Vec<&str> = list().into_iter().map(|(name, _)| name).collect();
        let different: BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(different.len(), names.len());
        assert!(names.len() > 150, "{}", names.len());
    }

    #[test]
    fn a_report_without_a_passed_case_is_not_good() {
        let outcome = |verdict| Outcome { name: "x", verdict, millis: 0 };
        let report = |outcomes| Report {
            driver: "d".to_owned(),
            version: "1".to_owned(),
            outcomes,
            leaked: Vec::new(),
        };
        assert!(!report(Vec::new()).is_good());
        assert!(!report(vec![outcome(Verdict::NotOffered("x".to_owned()))]).is_good());
        let failed = vec![outcome(Verdict::Passed), outcome(Verdict::Failed("x".to_owned()))];
        assert!(!report(failed).is_good());
        let mut good = report(vec![outcome(Verdict::Passed)]);
        assert!(good.is_good());
        good.leaked.push("volume a".to_owned());
        assert!(!good.is_good());
    }
}
