//! The story as the documents show it: figures of an example in place of those of a run, so that
//! the picture is the same each time it is drawn.

use super::events::State;
use super::plot::{Note, Sample, svg};

/// MiB a second that the writer sends.
const SPEED: f64 = 32.0;
/// The speed that is left to it while the pool is nearly full.
const LEAST: f64 = 8.0;
/// Samples a second.
const SAMPLES: u32 = 2;
/// When the story ends, in seconds.
const END: f64 = 104.0;

/// The marks, as multiples of the speed: seconds of writing.
const LOW: f64 = 20.0;
const VERY_LOW: f64 = 5.0;

/// An example: the pool grows twice by itself, then is full, and is grown by hand.
fn example() -> (Vec<Sample>, Vec<(f64, State)>, Vec<Note>) {
    let notes = [
        (14.0, 640.0, "the pool is low, and its file grows"),
        (35.0, 480.0, "it is low again, and its hook adds space"),
        (88.0, 1280.0, "blockd pool grow"),
    ];
    let (low, very_low) = (LOW * SPEED, VERY_LOW * SPEED);
    let (mut free, mut state) = (1000.0_f64, State::Normal);
    let (mut samples, mut crossings) = (Vec::new(), Vec::new());
    let step = 1.0 / f64::from(SAMPLES);
    let mut waits_since = None;
    for number in 0.. {
        let at = f64::from(number) * step;
        if at > END {
            break;
        }
        let grown = notes.iter().find(|note| (note.0 - at).abs() < step / 2.0);
        free += grown.map_or(0.0, |note| note.1);
        // Throttled so that the free space lasts, but for what a write waits at most.
        let rate = if free < LEAST * step { 0.0 } else { SPEED.min(free / VERY_LOW).max(LEAST) };
        let now = match free {
            _ if rate <= 0.0 => State::Full,
            _ if free < very_low => State::VeryLow,
            _ if free < low => State::Low,
            _ => State::Normal,
        };
        if now != state {
            crossings.push((at, now));
            state = now;
        }
        waits_since = if state == State::Full { waits_since.or(Some(at)) } else { None };
        let throttled = 0.003 * SPEED / rate.max(0.1);
        let delay = waits_since.map_or(throttled, |since| at - since + 1.0);
        samples.push(Sample { at, rate, free, low, very_low, delay });
        free = (free - rate * step).max(0.0);
    }
    let note = |&(at, _, text): &(f64, f64, &str)| Note { at, text: text.to_owned() };
    (samples, crossings, notes.iter().map(note).collect())
}

mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_example_has_every_state_and_ends_well() {
        let (samples, crossings, _) = example();
        let states: Vec<State> = crossings.iter().map(|crossing| crossing.1).collect();
        for state in State::ALL {
            assert!(states.contains(&state), "{state:?}: {states:?}");
        }
        assert_eq!(states.last(), Some(&State::Normal));
        assert!(samples.iter().all(|one| one.free >= 0.0 && one.rate <= SPEED));
    }

    /// `cargo ci screens --write` sets `BLOCKD_WRITE_SCREENS`, and the file is written.
    #[test]
    fn the_picture_of_the_documents_is_up_to_date() {
        let (samples, crossings, notes) = example();
        let title = "Example of a pool that fills up: the writer is throttled, waits, and goes on";
        let text = svg(&samples, &crossings, &notes, title);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/screens");
        let path = folder.join("space-story.svg");
        if std::env::var_os("BLOCKD_WRITE_SCREENS").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &text).unwrap();
        }
        let present = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(present == text, "{} is out of date: cargo ci screens --write", path.display());
    }
}
