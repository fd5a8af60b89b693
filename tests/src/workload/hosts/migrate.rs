//! A virtual machine with a mounted file system moves between two daemons while it runs, and its
//! disk follows it from one to the other. Migrations that fail leave it where it is.

mod guest;
mod journal;
mod records;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::tools;

use self::guest::Guest;
pub use self::records::records;
use super::rounds::Part;

/// Bytes of the disk. A long run leaves most of it free.
const DISK: usize = 1 << 30;
/// Read at a time.
const PIECE: usize = 1 << 20;

/// The ways in which a migration fails. One of each follows the first migrations.
#[derive(Clone, Copy, Debug)]
enum Failure {
    /// The target, that is the qemu to which the machine goes, dies while memory is copied.
    Killed,
    /// The machine has arrived there, and the target is ended instead of starting it.
    NotStarted,
    /// The copying of memory is called off.
    Cancelled,
}

impl Failure {
    const fn name(self) -> &'static str {
        match self {
            Self::Killed => "its target killed",
            Self::NotStarted => "not started at its target",
            Self::Cancelled => "cancelled",
        }
    }
}

const FAILURES: [Failure; 3] = [Failure::Killed, Failure::NotStarted, Failure::Cancelled];

/// Moves the machine once in each round.
///
/// # Errors
/// When the guest sees an error, stands still, or has lost a record that it had made durable.
pub fn migrate(part: &Part) -> Result<String> {
    let mut guest = Guest::boot(&part.run)?;
    let (mut pauses, mut gaps) = (Vec::new(), Vec::new());
    let mut failures = FAILURES.iter();
    for round in 1..=part.rounds {
        let moved = guest.migrate();
        let moved = moved.with_context(|| format!("migration {round}; {}", guest.last_words()))?;
        println!(
            "{}: {round} of {}: to {}, pause {} ms, longest gap of the writer {:.2} s",
            part.name,
            part.rounds,
            guest.host_name(),
            moved.pause.as_millis(),
            moved.gap.as_secs_f64()
        );
        pauses.push(moved.pause);
        gaps.push(moved.gap);
        if let Some(failure) = failures.next() {
            let (name, how) = (part.name, failure.name());
            let gap = guest.fail(*failure);
            let gap = gap.with_context(|| format!("a migration, {how}; {}", guest.last_words()))?;
            let gap = gap.as_secs_f64();
            println!("{name}: a migration, {how}: longest gap of the writer {gap:.2} s");
        }
    }
    let (done, failed) = (pauses.len(), FAILURES.len() - failures.len());
    let answered = guest.finish()?;
    Ok(format!(
        "{done} migrations and {failed} that failed: no error in the guest, each of its {answered} \
         durable records is there; pause {}; longest gap of the writer {}",
        middle_and_longest(&mut pauses),
        middle_and_longest(&mut gaps)
    ))
}

fn middle_and_longest(times: &mut [Duration]) -> String {
    times.sort();
    let [middle, longest] = [times.get(times.len() / 2), times.last()]
        .map(|time| time.copied().unwrap_or_default().as_secs_f64());
    format!("{middle:.2} s, at most {longest:.2} s")
}

/// Checks the file system in an image of the disk, and the guest's records in it.
fn check_image(image: &Path, folder: &Path, answered: u64) -> Result<()> {
    let (image, copy) = (image.display(), folder.join("copy"));
    tools::shell(&format!("e2fsck -fn {image} 2>&1")).context("the file system")?;
    tools::shell(&format!("debugfs -R 'dump /{} {}' {image} 2>&1", records::FILE, copy.display()))?;
    let file = std::fs::read(&copy).context("the file of records")?;
    ensure!(answered > 0, "no record was answered");
    records::check(&file, answered)
}
