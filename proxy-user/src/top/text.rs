//! Numbers and curves as text.

/// Returns a rate in at most five characters: `0`, `0.25`, `7.5`, `120`, `3.4k`, `1.2M`.
pub(super) fn rate(value: f64) -> String {
    const UNITS: [&str; 5] = ["", "k", "M", "G", "T"];
    let (mut value, mut unit) = (value, 0);
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let unit = UNITS.get(unit).copied().unwrap_or_default();
    if value < 0.005 {
        "0".to_owned()
    } else if unit.is_empty() && value < 0.995 {
        format!("{value:.2}")
    } else if value < 9.95 {
        format!("{value:.1}{unit}")
    } else {
        format!("{value:.0}{unit}")
    }
}

/// Returns the last `width` values as bars, scaled to the largest of them; missing values and 0 are blank.
pub(super) fn bars(values: impl DoubleEndedIterator<Item = f32>, width: usize) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let mut last: Vec<f32> = values.rev().take(width).collect();
    last.reverse();
    let most = last.iter().copied().fold(0.0, f32::max);
    #[expect(clippy::cast_sign_loss, reason = "from 0 to 8")]
    let bar = |value: f32| {
        let height = (value / most * 8.0).ceil() as usize;
        height.checked_sub(1).and_then(|height| BARS.get(height.min(7))).copied().unwrap_or(' ')
    };
    let text: String = last.iter().map(|value| if *value > 0.0 { bar(*value) } else { ' ' }).collect();
    let blank = width - last.len();
    format!("{:blank$}{text}", "")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(0.0, "0")]
    #[case(0.25, "0.25")]
    #[case(0.999, "1.0")]
    #[case(7.54, "7.5")]
    #[case(9.96, "10")]
    #[case(120.4, "120")]
    #[case(999.4, "999")]
    #[case(999.9, "1.0k")]
    #[case(3_449.0, "3.4k")]
    #[case(1_200_000.0, "1.2M")]
    #[case(4e15, "4000T")]
    fn rates(#[case] value: f64, #[case] expected: &str) {
        assert_eq!(rate(value), expected);
    }

    #[rstest]
    #[case(&[], "    ")]
    #[case(&[0.0, 0.0], "    ")]
    #[case(&[8.0], "   █")]
    #[case(&[9.0, 1.0, 2.0, 4.0, 8.0], "▁▂▄█")]
    #[case(&[0.01, 8.0], "  ▁█")]
    fn curves(#[case] values: &[f32], #[case] expected: &str) {
        assert_eq!(bars(values.iter().copied(), 4), expected);
    }
}
