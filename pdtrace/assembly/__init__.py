"""From marks to spans: requests are followed mark by mark, and built when they are over."""
