//! The story as a picture: rate, free space and delay over time, one below the other, with the
//! pool's states behind them. Readable on light and on dark ground, and without colours.

use std::fmt::Write as _;

use super::events::State;

/// Pixels.
const WIDTH: f64 = 960.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 880.0;
const TOP: f64 = 92.0;
const PANEL: f64 = 150.0;
const GAP: f64 = 42.0;
/// A state's name stands in its band where that is at least as wide.
const NAMED: f64 = 64.0;
/// A state that lasted for a moment is seen all the same.
const NARROW: f64 = 1.5;
/// Bounds of the axis of delays, in seconds: from a quick answer to what kills a guest.
const SHORTEST: f64 = 0.001;
const LONGEST: f64 = 100.0;

/// Colours are named twice and not as variables, which few viewers know.
const STYLE: &str = "\
.ground{fill:#fff}text{fill:#1f2328}.axis{stroke:#1f2328;fill:none}.grid{stroke:#d0d7de}
.line{stroke:#0b57a4;stroke-width:1.8;fill:none}
.mark{stroke:#57606a;stroke-dasharray:5 4;fill:none}.note{stroke:#1f2328;stroke-dasharray:2 3}
.low{fill:#fff3c0}.very-low{fill:#ffd8a8}.full{fill:#ffc4c4}
@media (prefers-color-scheme:dark){
.ground{fill:#14181d}text{fill:#e6edf3}.axis{stroke:#e6edf3}.grid{stroke:#3a424b}
.line{stroke:#79b8ff}.mark{stroke:#9aa4ad}.note{stroke:#e6edf3}
.low{fill:#433a10}.very-low{fill:#5a3710}.full{fill:#5f1f22}}
";

/// One observation.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Sample {
    /// Seconds since the beginning.
    pub at: f64,
    /// MiB a second that were answered since the last one.
    pub rate: f64,
    /// MiB left.
    pub free: f64,
    /// MiB below which the pool is low.
    pub low: f64,
    /// MiB below which it is very low.
    pub very_low: f64,
    /// Seconds that the slowest write took, or has been waiting for.
    pub delay: f64,
}

/// Something that was done at one moment.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Note {
    /// Seconds since the beginning.
    pub at: f64,
    pub text: String,
}

/// Draws the picture. `crossings` are the times at which the pool's state changed.
#[must_use]
pub fn svg(samples: &[Sample], crossings: &[(f64, State)], notes: &[Note], title: &str) -> String {
    let end = samples.last().map_or(1.0, |last| last.at).max(1.0);
    let height = TOP + 3.0 * (PANEL + GAP) + 34.0 + 20.0 * notes.len() as f64;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n\
         <title>{0}</title>\n<style>{STYLE}</style>\n\
         <rect class=\"ground\" width=\"{WIDTH}\" height=\"{height}\"/>\n\
         <text x=\"{LEFT}\" y=\"26\" font-size=\"16\">{0}</text>\n",
        escaped(title)
    );
    legend(&mut text);
    let x = |at: f64| LEFT + (RIGHT - LEFT) * (at / end).clamp(0.0, 1.0);
    let most = |of: fn(&Sample) -> f64| samples.iter().map(of).fold(1.0, f64::max);
    let rate = Scale::linear("written, MiB/s", most(|one| one.rate));
    let free = Scale::linear("free, MiB", most(|one| one.free));
    let delay = Scale::delays();
    for (scale, place) in [(&rate, 0.0), (&free, 1.0), (&delay, 2.0)] {
        let top = TOP + place * (PANEL + GAP);
        bands(&mut text, crossings, (top, end), x);
        scale.draw(&mut text, top, (end, x));
        let mut line = |class, of: fn(&Sample) -> f64| {
            let points = samples.iter().map(|one| (x(one.at), scale.y(top, of(one))));
            polyline(&mut text, class, points);
        };
        if std::ptr::eq(scale, &rate) {
            line("line", |one| one.rate);
        } else if std::ptr::eq(scale, &free) {
            line("mark", |one| one.low);
            line("mark", |one| one.very_low);
            line("line", |one| one.free);
            if let Some(last) = samples.last() {
                for (name, value) in [("low", last.low), ("very low", last.very_low)] {
                    label(&mut text, (RIGHT + 6.0, scale.y(top, value) + 4.0), "start", name);
                }
            }
        } else {
            line("line", |one| one.delay);
        }
    }
    let bottom = TOP + 3.0 * PANEL + 2.0 * GAP;
    label(&mut text, (f64::midpoint(LEFT, RIGHT), bottom + 34.0), "middle", "seconds");
    annotate(&mut text, notes, bottom, x);
    text += "</svg>\n";
    text
}

/// An axis of values, upwards.
struct Scale {
    name: &'static str,
    /// Values that have a line, and what they are called.
    ticks: Vec<(f64, String)>,
    most: f64,
    is_logarithmic: bool,
}

impl Scale {
    fn linear(name: &'static str, most: f64) -> Self {
        let step = step(most, 4.0);
        let mut ticks = Vec::new();
        let mut value = 0.0;
        while value < most + step {
            ticks.push((value, format!("{value}")));
            value += step;
        }
        let most = ticks.last().map_or(most, |last| last.0);
        Self { name, ticks, most, is_logarithmic: false }
    }

    fn delays() -> Self {
        let names = ["1 ms", "10 ms", "100 ms", "1 s", "10 s", "100 s"];
        let mut value = SHORTEST / 10.0;
        let tick = |name: &&str| {
            value *= 10.0;
            (value, (*name).to_owned())
        };
        let ticks = names.iter().map(tick).collect();
        Self { name: "slowest write", ticks, most: LONGEST, is_logarithmic: true }
    }

    fn y(&self, top: f64, value: f64) -> f64 {
        let part = if self.is_logarithmic {
            (value.max(SHORTEST) / SHORTEST).log10() / (LONGEST / SHORTEST).log10()
        } else {
            value / self.most
        };
        top + PANEL * (1.0 - part.clamp(0.0, 1.0))
    }

    fn draw(&self, text: &mut String, top: f64, (end, x): (f64, impl Fn(f64) -> f64)) {
        for (value, name) in &self.ticks {
            let y = self.y(top, *value);
            straight(text, "grid", (LEFT, y), (RIGHT, y));
            label(text, (LEFT - 8.0, y + 4.0), "end", name);
        }
        let step = step(end, 8.0);
        let mut at = 0.0;
        while at <= end {
            straight(text, "axis", (x(at), top + PANEL), (x(at), top + PANEL + 5.0));
            label(text, (x(at), top + PANEL + 18.0), "middle", &format!("{at}"));
            at += step;
        }
        let corner = top + PANEL;
        polyline(text, "axis", [(LEFT, top), (LEFT, corner), (RIGHT, corner)].into_iter());
        label(text, (LEFT, top - 8.0), "start", self.name);
    }
}

/// A round step so that there are about as many.
fn step(most: f64, about: f64) -> f64 {
    let rough = most / about;
    let power = 10_f64.powf(rough.log10().floor());
    let round = [1.0, 2.0, 2.5, 5.0].into_iter().find(|one| one * power >= rough);
    round.unwrap_or(10.0) * power
}

fn bands(
    text: &mut String,
    crossings: &[(f64, State)],
    (top, end): (f64, f64),
    x: impl Fn(f64) -> f64,
) {
    for (number, (from, state)) in crossings.iter().enumerate() {
        let Some(class) = class(*state) else { continue };
        let to = crossings.get(number + 1).map_or(end, |next| next.0);
        let (left, width) = (x(*from), (x(to) - x(*from)).max(NARROW));
        let _ = writeln!(
            text,
            "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{top}\" width=\"{width:.1}\" \
             height=\"{PANEL}\"/>"
        );
        if width >= NAMED {
            label(text, (left + 5.0, top + 15.0), "start", state.name());
        }
    }
}

const fn class(state: State) -> Option<&'static str> {
    match state {
        State::Normal => None,
        State::Low => Some("low"),
        State::VeryLow => Some("very-low"),
        State::Full => Some("full"),
    }
}

fn legend(text: &mut String) {
    let mut left = LEFT;
    for state in State::ALL {
        let Some(class) = class(state) else { continue };
        let _ = writeln!(
            text,
            "<rect class=\"{class}\" x=\"{left}\" y=\"42\" width=\"26\" height=\"14\"/>"
        );
        label(text, (left + 32.0, 54.0), "start", state.name());
        left += 110.0;
    }
    straight(text, "mark", (left, 49.0), (left + 26.0, 49.0));
    label(text, (left + 32.0, 54.0), "start", "where a state begins");
}

/// Numbers above the picture, and what they mean below it.
fn annotate(text: &mut String, notes: &[Note], bottom: f64, x: impl Fn(f64) -> f64) {
    let mut below = bottom + 58.0;
    for (note, number) in notes.iter().zip(1_u32..) {
        let at = x(note.at);
        straight(text, "note", (at, TOP - 32.0), (at, bottom));
        label(text, (at + 3.0, TOP - 23.0), "start", &number.to_string());
        let words = format!("{number}: at {:.0} s, {}", note.at, note.text);
        label(text, (LEFT, below), "start", &words);
        below += 20.0;
    }
}

fn polyline(text: &mut String, class: &str, points: impl Iterator<Item = (f64, f64)>) {
    let _ = write!(text, "<polyline class=\"{class}\" points=\"");
    for (x, y) in points {
        let _ = write!(text, "{x:.1},{y:.1} ");
    }
    text.push_str("\"/>\n");
}

fn straight(text: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        text,
        "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn label(text: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let words = escaped(words);
    let _ =
        writeln!(text, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_its_axes_its_states_and_its_notes() {
        let sample = |at| Sample {
            at,
            rate: 32.0,
            free: 700.0 - at * 10.0,
            low: 300.0,
            very_low: 75.0,
            delay: at,
        };
        let samples: Vec<Sample> = (0..60_u32).map(|at| sample(f64::from(at))).collect();
        let crossings = [(20.0, State::Low), (30.0, State::VeryLow), (50.0, State::Full)];
        let notes = [Note { at: 25.0, text: "a & b".to_owned() }];
        let text = svg(&samples, &crossings, &notes, "a < b");
        assert_eq!(text.matches("class=\"full\"").count(), 4, "three panels and the legend");
        assert_eq!(text.matches(">very low</text>").count(), 5, "with the mark's name");
        for part in ["a &lt; b", "1: at 25 s, a &amp; b", ">seconds<", ">free, MiB<", ">10 s<"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(text.matches("<polyline class=\"line\"").count(), 3);
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert!(svg(&[], &[], &[], "").ends_with("</svg>\n"));
    }

    #[test]
    fn axes_have_round_steps_and_hold_the_largest_value() {
        assert_eq!((step(100.0, 4.0), step(0.9, 4.0), step(1300.0, 4.0)), (25.0, 0.25, 500.0));
        let scale = Scale::linear("", 61.0);
        assert!((scale.most - 80.0).abs() < 1e-9, "{}", scale.most);
        let delays = Scale::delays();
        assert!((delays.y(0.0, 0.0) - PANEL).abs() < 1e-9);
        assert!(delays.y(0.0, 1000.0).abs() < 1e-9);
        assert!((delays.y(0.0, 1.0) - PANEL * 0.4).abs() < 1e-6);
    }
}
